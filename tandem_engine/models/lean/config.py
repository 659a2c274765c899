"""Describes a decoder beside its weights: shapes, layer kinds, scales."""

from __future__ import annotations

from dataclasses import dataclass

from tandem_engine.ops.base import Activation


class NotLean(ValueError):
    """The decoder lacks this variant; the compatibility route may serve it. The message names what is missing."""


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of a layer's MLP."""

    num_experts: int
    num_chosen: int
    """Experts per token."""
    normalised: bool
    """Whether the chosen experts' probabilities are scaled to a sum of 1."""


@dataclass(frozen=True)
class LayerConfig:
    """How one layer differs from others."""

    window: int | None = None
    """Positions that a token attends to, its own included; None: all up to its own."""
    rope: str | None = ""
    """The rotary table: a layer type if the model has one table per type, "" if it has one; None: no rotation."""
    experts: ExpertsConfig | None = None
    """None: a plain MLP."""


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder of one checkpoint. Which norms and biases a family has is read from its weights."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    activation: Activation = "silu"
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    tied: bool = False
    """Whether the head and the embeddings share their weights."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)
