"""torch.distributed is not available inside `without_distributed`, and the lean route loads without its tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from tandem_engine.models.without_distributed import without_distributed

_PROBE = """
import sys
from tandem_engine.models.without_compiler import without_compiler
from tandem_engine.models.without_distributed import without_distributed
with without_compiler(), without_distributed():
    from tandem_engine.assembly import assemble
    from tandem_engine.settings import EngineConfig
    config = EngineConfig(model=sys.argv[1], route=sys.argv[2], device="cpu", dtype="float32", num_kv_blocks=16)
    assemble(config, lambda stage, fraction: None)
print("torch.distributed.tensor" in sys.modules, "sympy" in sys.modules)
"""


def test_it_is_torchs_own_afterwards() -> None:
    is_available = torch.distributed.is_available
    with without_distributed():
        assert not torch.distributed.is_available()
    assert torch.distributed.is_available is is_available


def test_loading_a_model_within_it_imports_no_distributed_tensors(make_checkpoint: Callable[[str], Path]) -> None:
    assert _imported(make_checkpoint("llama"), "lean") == ["False", "False"]


def test_the_compatibility_route_loads_a_model_within_it(make_checkpoint: Callable[[str], Path]) -> None:
    """There transformers loads the compiler, which imports all of it: a mark that `without_compiler` does not reach."""
    assert _imported(make_checkpoint("llama"), "transformers")


def _imported(folder: Path, route: str) -> list[str]:
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, str(folder), route], capture_output=True, text=True, check=False, timeout=120
    )
    assert probe.returncode == 0, probe.stderr
    return probe.stdout.split()
