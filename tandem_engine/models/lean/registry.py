"""Lists the families that the lean decoder serves."""

from __future__ import annotations

from typing import Any

from tandem_engine.models.lean.families import (
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from tandem_engine.models.lean.family import Family

FAMILIES: dict[str, Family] = {
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "granite": granite.FAMILY,
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "mixtral": mixtral.FAMILY,
    "olmo2": olmo2.FAMILY,
    "phi3": phi3.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "smollm3": smollm3.FAMILY,
}
"""By `model_type` of the transformers configuration."""


def find_family(config: Any) -> Family | None:
    """Return the family of a transformers configuration; None: the compatibility route serves the model."""
    return FAMILIES.get(config.model_type)
