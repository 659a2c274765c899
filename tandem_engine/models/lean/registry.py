"""Which families does the decoder serve?"""

from __future__ import annotations

from typing import Any

from tandem_engine.models.lean.families import gemma2, gemma3, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from tandem_engine.models.lean.family import Family

FAMILIES: dict[str, Family] = {
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "mixtral": mixtral.FAMILY,
    "phi3": phi3.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
}
"""By `model_type` of the transformers configuration."""


def find_family(config: Any) -> Family | None:
    """Return the family of a transformers configuration; None: the compatibility route's business."""
    return FAMILIES.get(config.model_type)
