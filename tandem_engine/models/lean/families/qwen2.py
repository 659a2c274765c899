"""Qwen 2: Llama with biases on queries, keys and values, and windows by layer."""

from __future__ import annotations

from typing import Any

from tandem_engine.models.lean.family import Family, decoder_config
from tandem_engine.models.lean.sources import Plan, attention, gated_mlp, pre_norms


def _layer(config: Any, index: int) -> Plan:
    layer = f"model.layers.{index}"
    return {**pre_norms(layer), **attention(layer, bias=True), **gated_mlp(f"{layer}.mlp")}


FAMILY = Family(decoder_config, _layer)
