"""Collects the facts of a checkpoint that other processes need: names, limits, digests, defaults, chat template."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem_engine.messages import ModelInfo
from tandem_engine.models.checkpoint import Checkpoint
from tandem_engine.models.digest import DigestCache
from tandem_engine.models.vision import text_name

_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Name in generation_config.json -> name in requests."""


@dataclass(frozen=True)
class Numerics:
    """The arithmetic of a loaded model."""

    name: str
    """The name of the numerics class."""
    architecture: str
    dtype: torch.dtype
    device: torch.device


def weights_digest(checkpoint: Checkpoint, digests: DigestCache) -> str:
    """Return the digest of the weight files and the configuration."""
    return digests.digest([*checkpoint.weight_files, checkpoint.folder / "config.json"])


def describe(
    checkpoint: Checkpoint, config: Any, context_length: int, numerics: Numerics, digests: DigestCache
) -> ModelInfo:
    """Return the facts of a checkpoint as it is served; hashes its files unless `digests` has their digests."""
    generation = _read_json(checkpoint.folder / "generation_config.json")
    dtype = str(numerics.dtype).removeprefix("torch.")
    return ModelInfo(
        model_id=checkpoint.model_id,
        architecture=numerics.architecture,
        num_parameters=_num_parameters(checkpoint),
        dtype=dtype,
        device=str(numerics.device),
        vocab_size=config.vocab_size,
        context_length=context_length,
        eos_token_ids=_eos_token_ids(generation, config),
        generation_defaults=_generation_defaults(generation),
        chat_template=_chat_template(checkpoint.folder),
        weights_digest=weights_digest(checkpoint, digests),
        quantization="",
        kv_dtype=dtype,
        tokenizer_digest=digests.digest([Path(path) for path in checkpoint.assets.values()]),
        numerics_class=numerics.name,
        asset_paths=checkpoint.assets,
    )


def _num_parameters(checkpoint: Checkpoint) -> int:
    """Count the text model's numbers in the files, which hold tied weights once."""
    shapes = checkpoint.tensor_shapes
    return sum(math.prod(shape) for name, shape in shapes.items() if text_name(name) is not None)


def _eos_token_ids(generation: dict[str, Any], config: Any) -> list[int]:
    eos = generation.get("eos_token_id", getattr(config, "eos_token_id", None))
    if eos is None:
        return []
    return list(eos) if isinstance(eos, list) else [eos]


def _generation_defaults(generation: dict[str, Any]) -> dict[str, float]:
    return {ours: float(generation[theirs]) for theirs, ours in _DEFAULTS.items() if generation.get(theirs) is not None}


def _chat_template(folder: Path) -> str:
    """Return the Jinja source of the chat template, "" if there is none; of several, that called "default"."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = _read_json(folder / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), "")
    return str(template)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
