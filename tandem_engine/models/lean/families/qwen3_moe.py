"""Qwen 3 as a mixture of experts: some layers have a plain MLP, and one window is for all."""

from __future__ import annotations

from typing import Any

from tandem_engine.models.lean.config import DecoderConfig, ExpertsConfig, LayerConfig
from tandem_engine.models.lean.family import Family, decoder_config
from tandem_engine.models.lean.sources import Plan, attention, experts, gated_mlp, pre_norms


def _has_experts(config: Any, index: int) -> bool:
    is_sparse = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
    return is_sparse and index not in config.mlp_only_layers


def _decoder(config: Any) -> DecoderConfig:
    mixture = ExpertsConfig(config.num_experts, config.num_experts_per_tok, config.norm_topk_prob)
    layers = tuple(
        LayerConfig(config.sliding_window, experts=mixture if _has_experts(config, index) else None)
        for index in range(config.num_hidden_layers)
    )
    return decoder_config(config, layers)


def _layer(config: Any, index: int) -> Plan:
    layer = f"model.layers.{index}"
    mlp = f"{layer}.mlp"
    bias = bool(config.attention_bias)
    return {
        **pre_norms(layer),
        **attention(layer, bias=bias, output_bias=bias, head_norms=0.0),
        **(
            experts(f"{mlp}.gate", f"{mlp}.experts", config.num_experts, "gate_proj", "up_proj", "down_proj")
            if _has_experts(config, index)
            else gated_mlp(mlp)
        ),
    }


FAMILY = Family(_decoder, _layer)
