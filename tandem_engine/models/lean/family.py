"""Defines what a model family provides, and what most families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem_engine.models.lean.config import DecoderConfig, LayerConfig, NotLean
from tandem_engine.models.lean.sources import NormSource, Plan, Source, TableSource, linear
from tandem_engine.ops.base import Activation

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True)
class Family:
    """Maps a transformers configuration and a checkpoint's names to ours."""

    decoder: Callable[[Any], DecoderConfig]
    """Takes the transformers configuration; raises NotLean."""
    layer: Callable[[Any, int], Plan]
    """Takes the transformers configuration and a layer's index; returns our names without "layers.{i}."."""
    norm_offset: float = 0.0
    """Added to the final norm's weight."""

    def plan(self, config: Any) -> Plan:
        """Return the source of every weight of the decoder."""
        plan: dict[str, Source] = {}
        if not config.tie_word_embeddings:
            plan["embeddings"] = TableSource("model.embed_tokens.weight")
        for index in range(config.num_hidden_layers):
            plan |= {f"layers.{index}.{name}": source for name, source in self.layer(config, index).items()}
        plan["final_norm"] = NormSource("model.norm.weight", self.norm_offset)
        plan["head"] = linear("model.embed_tokens" if config.tie_word_embeddings else "lm_head")
        return plan


def decoder_config(config: Any, layers: tuple[LayerConfig, ...] | None = None, **values: Any) -> DecoderConfig:
    """Return the decoder by the fields that most configurations share; `values` override them. Raises NotLean."""
    head_dim = head_dim_of(config)
    common: dict[str, Any] = {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "layers": layers if layers is not None else layer_configs(config),
        "norm_eps": config.rms_norm_eps,
        "activation": activation(config),
        "attention_scale": head_dim**-0.5,
        "tied": bool(config.tie_word_embeddings),
    }
    return DecoderConfig(**common | values)


def head_dim_of(config: Any) -> int:
    """Return the size of a head; default: the hidden size over the number of heads."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def layer_configs(config: Any, *, rope_by_type: bool = False) -> tuple[LayerConfig, ...]:
    """Return each layer's window, by `layer_types` if the configuration has them, else the same for all layers."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        return tuple(LayerConfig(window) for _ in range(config.num_hidden_layers))
    return tuple(
        LayerConfig(window if kind == "sliding_attention" else None, kind if rope_by_type else "") for kind in types
    )


def activation(config: Any) -> Activation:
    """Return the MLP's activation; raises NotLean for an activation that no backend has."""
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in _ACTIVATIONS:
        raise NotLean(f"{config.model_type} with the activation {name}; the decoder has {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
