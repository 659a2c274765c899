"""Gemma 3 (text): query and key norms per head, four norms per layer, separate rotary tables for windowed layers."""

from __future__ import annotations

from typing import Any

from tandem_engine.models.lean.config import DecoderConfig
from tandem_engine.models.lean.family import Family, decoder_config, layer_configs
from tandem_engine.models.lean.sources import Plan, attention, gated_mlp, sandwich_norms

_NORM_OFFSET = 1.0


def _decoder(config: Any) -> DecoderConfig:
    return decoder_config(
        config,
        layer_configs(config, rope_by_type=True),
        attention_scale=config.query_pre_attn_scalar**-0.5,
        logit_softcap=config.final_logit_softcapping,  # its attention ignores attn_logit_softcapping
        embedding_scale=config.hidden_size**0.5,
    )


def _layer(config: Any, index: int) -> Plan:
    layer = f"model.layers.{index}"
    bias = bool(config.attention_bias)
    return {
        **sandwich_norms(layer, _NORM_OFFSET),
        **attention(layer, bias=bias, output_bias=bias, head_norms=_NORM_OFFSET),
        **gated_mlp(f"{layer}.mlp"),
    }


FAMILY = Family(_decoder, _layer, _NORM_OFFSET)
