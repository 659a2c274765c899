"""Llama 2 and 3, and models with their configuration."""

from __future__ import annotations

from typing import Any

from tandem_engine.models.lean.family import Family, decoder_config
from tandem_engine.models.lean.sources import Plan, attention, gated_mlp, pre_norms


def _layer(config: Any, index: int) -> Plan:
    layer = f"model.layers.{index}"
    bias = bool(config.attention_bias)
    return {
        **pre_norms(layer),
        **attention(layer, bias=bias, output_bias=bias),
        **gated_mlp(f"{layer}.mlp", bias=bool(config.mlp_bias)),
    }


FAMILY = Family(decoder_config, _layer)
