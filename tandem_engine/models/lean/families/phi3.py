"""Phi 3: fused projections in the checkpoint, one window for all layers, rotary embedding of a part of each head."""

from __future__ import annotations

from typing import Any

from tandem_engine.models.lean.config import DecoderConfig, LayerConfig
from tandem_engine.models.lean.family import Family, decoder_config
from tandem_engine.models.lean.sources import Plan, linear, pre_norms


def _decoder(config: Any) -> DecoderConfig:
    return decoder_config(config, (LayerConfig(config.sliding_window),) * config.num_hidden_layers)


def _layer(config: Any, index: int) -> Plan:
    layer = f"model.layers.{index}"
    return {
        **pre_norms(layer),
        "qkv": linear(f"{layer}.self_attn.qkv_proj"),
        "output": linear(f"{layer}.self_attn.o_proj"),
        "gate_up": linear(f"{layer}.mlp.gate_up_proj"),
        "down": linear(f"{layer}.mlp.down_proj"),
    }


FAMILY = Family(_decoder, _layer)
