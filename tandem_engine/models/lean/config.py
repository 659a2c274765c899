"""What must the decoder know of a model, beside its weights?"""

from __future__ import annotations

from dataclasses import dataclass

from tandem_engine.ops.base import Activation


class NotLean(ValueError):
    """The decoder does not know this variant; the compatibility route may. The message says what is unknown."""


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in the place of a layer's MLP."""

    num_experts: int
    num_chosen: int
    """Per token."""
    normalised: bool
    """Whether the chosen experts' probabilities are scaled to a sum of 1."""


@dataclass(frozen=True)
class LayerConfig:
    """How one layer differs from others."""

    window: int | None = None
    """Positions that a token sees, itself among them; None: all before it."""
    rope: str = ""
    """Which rotary table: a layer type, where a model has a table for each; "" where it has one."""
    experts: ExpertsConfig | None = None
    """None: a plain MLP."""


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder of one checkpoint. Norms and biases that a family has or lacks show in its weights."""

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
    embedding_scale: float = 1.0
    tied: bool = False
    """Whether the head's weights are the embeddings'."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)
