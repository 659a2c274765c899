"""Lists the engines that are measured and how each is started: our variants, and the peers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.lib.engine_models import Form
from benchmarks.peers import places
from tandem_engine.settings import EngineConfig

OURS_FP32 = "tandem_lean_fp32"
OURS_BF16 = "tandem_lean_bf16"
OURS_COMPAT = "tandem_compat"
OPENVINO = "openvino"
LLAMA_CPP = "llama_cpp"


@dataclass(frozen=True)
class EngineKind:
    """One engine with its settings. `name` names its figures."""

    name: str
    module: str
    """Speaks `benchmarks.peers.protocol`."""
    form: Form
    """Of the checkpoint."""
    python: Path = Path(sys.executable)
    installed_as: str = ""
    """Mark that `make peers` leaves; empty: in our own environment."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Ours: fields of EngineConfig."""
    environment: Mapping[str, str] = field(default_factory=dict)
    weight_bytes: int = 4
    """Per number, as a step reads them."""
    copies: float = 1.0
    """How often the weights are in memory at the most."""
    batches: tuple[int, ...] = (1, 8, 32)
    is_ours: bool = False
    is_extra: bool = False
    """Where not all fit into memory, those that targets compare stay together; extra ones make a second team."""

    @property
    def missing(self) -> str:
        """Why it cannot be measured here; empty if it can."""
        if self.installed_as and not places.is_installed(self.installed_as):
            return f"not installed; `make peers` would (or: python -m benchmarks.peers.install {self.installed_as})"
        if self.is_ours:
            known = set(EngineConfig.__struct_fields__)
            if unknown := sorted(set(self.settings) - known):
                return f"EngineConfig has no {', '.join(unknown)}"
        return ""


def _ours(name: str, form: Form, settings: Mapping[str, Any], weight_bytes: int, copies: float) -> EngineKind:
    module = "benchmarks.peers.tandem_engine"
    return EngineKind(name, module, form, settings=settings, weight_bytes=weight_bytes, copies=copies, is_ours=True)


_LEAN = {"route": "lean", "dtype": "float32"}
_LEAN_BF16 = {"route": "lean", "dtype": "auto"}  # weights stay what they are in the checkpoint
_COMPAT = {"route": "transformers", "dtype": "float32"}
OURS = (
    _ours(OURS_FP32, "fp32", _LEAN, weight_bytes=4, copies=1.2),
    _ours(OURS_BF16, "bf16", _LEAN_BF16, weight_bytes=2, copies=1.2),
    replace(_ours(OURS_COMPAT, "fp32", _COMPAT, weight_bytes=4, copies=1.3), is_extra=True),
)
PEERS = (
    EngineKind(
        OPENVINO,
        "benchmarks.peers.openvino_engine",
        "openvino",
        places.OPENVINO_PYTHON,
        "openvino",
        copies=2.0,
    ),
    EngineKind(
        LLAMA_CPP,
        "benchmarks.peers.llama_cpp_engine",
        "gguf_f32",
        places.LLAMA_CPP_PYTHON,
        "llama_cpp",
        environment={"LLAMA_CPP_LIB_PATH": str(places.LLAMA_CPP_BUILD)},
        copies=1.1,
    ),
    EngineKind("transformers", "benchmarks.peers.transformers_generate", "fp32", copies=1.2, is_extra=True),
    # Continuous batching of 32 computes its prompts for minutes before the first step.
    EngineKind(
        "transformers_cb", "benchmarks.peers.transformers_continuous", "fp32", copies=1.2, batches=(1, 8), is_extra=True
    ),
)


def available(kinds: Sequence[EngineKind], names: Sequence[str] | None) -> tuple[list[EngineKind], dict[str, str]]:
    """Return those of these names (None: all) that can be measured here, and why each of the others cannot.

    Raises SystemExit for a name that is none.
    """
    known = [kind.name for kind in kinds]
    if unknown := sorted(set(names or ()) - set(known)):
        raise SystemExit(f"no such engine: {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = [kind for kind in kinds if names is None or kind.name in names]
    missing = {kind.name: kind.missing for kind in wanted if kind.missing}
    return [kind for kind in wanted if kind.name not in missing], missing
