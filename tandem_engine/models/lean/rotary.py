"""Computes the cosine and sine tables of a model's rotary embeddings.

The frequencies come from transformers, so every kind of scaling agrees. Kinds that change with a request's length
("longrope", "dynamic") are served up to the length where they start to change (see `support.context_length`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem_engine.models.lean.config import NotLean
from tandem_engine.models.lean.family import head_dim_of
from tandem_engine.ops.base import Rotary


def rotary_tables(config: Any, num_positions: int, device: torch.device) -> dict[str, Rotary]:
    """Return the tables by layer type, or one called "" if all layers share it; raises NotLean."""
    parameters = config.rope_parameters
    by_type = {kind: rope for kind, rope in parameters.items() if isinstance(rope, Mapping)}
    if by_type:
        return {kind: _table(config, rope, kind, num_positions, device) for kind, rope in by_type.items()}
    return {"": _table(config, parameters, None, num_positions, device)}


def _table(
    config: Any, rope: Mapping[str, Any], layer_type: str | None, num_positions: int, device: torch.device
) -> Rotary:
    frequencies, factor = _frequencies(config, rope, layer_type)
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies.float()
    return Rotary(angles.cos().mul_(factor).to(device), angles.sin().mul_(factor).to(device))


def _frequencies(config: Any, rope: Mapping[str, Any], layer_type: str | None) -> tuple[torch.Tensor, float]:
    """Return the frequencies [rotary_dim / 2] and the factor of cosines and sines."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        dim = int(head_dim_of(config) * rope.get("partial_rotary_factor", 1.0))
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0
    if kind not in ROPE_INIT_FUNCTIONS:
        raise NotLean(f"{config.model_type} with the rotary embedding {kind}, which transformers lacks too")
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type)
    return frequencies, float(factor)
