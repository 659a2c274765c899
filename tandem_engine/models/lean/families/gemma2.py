"""Gemma 2: four norms per layer, soft-capped scores and logits, windows in every other layer."""

from __future__ import annotations

from typing import Any

from tandem_engine.models.lean.config import DecoderConfig
from tandem_engine.models.lean.family import Family, decoder_config
from tandem_engine.models.lean.sources import Plan, attention, gated_mlp, sandwich_norms

_NORM_OFFSET = 1.0


def _decoder(config: Any) -> DecoderConfig:
    return decoder_config(
        config,
        attention_scale=config.query_pre_attn_scalar**-0.5,
        attention_softcap=config.attn_logit_softcapping,
        logit_softcap=config.final_logit_softcapping,
        embedding_scale=config.hidden_size**0.5,
    )


def _layer(config: Any, index: int) -> Plan:
    layer = f"model.layers.{index}"
    bias = bool(config.attention_bias)
    return {
        **sandwich_norms(layer, _NORM_OFFSET),
        **attention(layer, bias=bias, output_bias=bias),
        **gated_mlp(f"{layer}.mlp"),
    }


FAMILY = Family(_decoder, _layer, _NORM_OFFSET)
