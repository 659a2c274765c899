"""OLMo 2: norms after attention and MLP instead of before, and norms of all queries and all keys of a token."""

from __future__ import annotations

from typing import Any

from tandem_engine.models.lean.family import Family, decoder_config
from tandem_engine.models.lean.sources import NormSource, Plan, attention, gated_mlp


def _layer(config: Any, index: int) -> Plan:
    layer = f"model.layers.{index}"
    bias = bool(config.attention_bias)
    return {
        **attention(layer, bias=bias, output_bias=bias),
        "query_projection_norm": NormSource(f"{layer}.self_attn.q_norm.weight"),
        "key_projection_norm": NormSource(f"{layer}.self_attn.k_norm.weight"),
        "attention_output_norm": NormSource(f"{layer}.post_attention_layernorm.weight"),
        **gated_mlp(f"{layer}.mlp"),
        "mlp_output_norm": NormSource(f"{layer}.post_feedforward_layernorm.weight"),
    }


FAMILY = Family(decoder_config, _layer)
