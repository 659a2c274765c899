"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from tandem_engine.models.lean.config import DecoderConfig, ExpertsConfig, LayerConfig
from tandem_engine.models.lean.family import Family, decoder_config
from tandem_engine.models.lean.sources import Plan, attention, experts, pre_norms


def _decoder(config: Any) -> DecoderConfig:
    mixture = ExpertsConfig(config.num_local_experts, config.num_experts_per_tok, normalised=True)
    return decoder_config(config, (LayerConfig(config.sliding_window, experts=mixture),) * config.num_hidden_layers)


def _layer(config: Any, index: int) -> Plan:
    layer = f"model.layers.{index}"
    block = f"{layer}.block_sparse_moe"
    return {
        **pre_norms(layer),
        **attention(layer),
        **experts(f"{block}.gate", f"{block}.experts", config.num_local_experts, "w1", "w3", "w2"),
    }


FAMILY = Family(_decoder, _layer)
