"""The compiler's mark is missing inside `without_compiler` and is back afterwards."""

import subprocess
import sys
from pathlib import Path

import torch

from tandem_engine.models.without_compiler import without_compiler

_PROBE = """
import sys
from tandem_engine.models.without_compiler import without_compiler
with without_compiler():
    from transformers import AutoConfig
    AutoConfig.from_pretrained(sys.argv[1])
print("torch._dynamo" in sys.modules)
"""


def test_within_it_a_mark_changes_nothing_and_afterwards_it_is_torchs_own() -> None:
    marking = torch.compiler.disable

    def function() -> int:
        return 1

    with without_compiler():
        assert torch.compiler.disable(function) is function
        assert torch.compiler.disable(recursive=False)(function) is function
    assert torch.compiler.disable is marking


def test_reading_a_models_config_within_it_does_not_load_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert probe.stdout.strip() == "False"
