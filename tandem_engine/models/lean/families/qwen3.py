"""Qwen 3: Llama with norms of each query and key head, and windows by layer."""

from __future__ import annotations

from typing import Any

from tandem_engine.models.lean.family import Family, decoder_config
from tandem_engine.models.lean.sources import Plan, attention, gated_mlp, pre_norms


def _layer(config: Any, index: int) -> Plan:
    layer = f"model.layers.{index}"
    bias = bool(config.attention_bias)
    return {
        **pre_norms(layer),
        **attention(layer, bias=bias, output_bias=bias, head_norms=0.0),
        **gated_mlp(f"{layer}.mlp"),
    }


FAMILY = Family(decoder_config, _layer)
