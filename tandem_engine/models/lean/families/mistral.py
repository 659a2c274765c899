"""Mistral: Llama with a window over all layers."""

from __future__ import annotations

from typing import Any

from tandem_engine.models.lean.config import DecoderConfig, LayerConfig
from tandem_engine.models.lean.family import Family, decoder_config
from tandem_engine.models.lean.sources import Plan, attention, gated_mlp, pre_norms


def _decoder(config: Any) -> DecoderConfig:
    return decoder_config(config, (LayerConfig(config.sliding_window),) * config.num_hidden_layers)


def _layer(config: Any, index: int) -> Plan:
    layer = f"model.layers.{index}"
    return {**pre_norms(layer), **attention(layer), **gated_mlp(f"{layer}.mlp")}


FAMILY = Family(_decoder, _layer)
