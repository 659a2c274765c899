"""Describes an encoder beside its weights: shapes and positions."""

from __future__ import annotations

from dataclasses import dataclass

from tandem_engine.ops.base import EncoderActivation


@dataclass(frozen=True)
class EncoderConfig:
    """A post-norm encoder of BERT's kind."""

    model_type: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    """Positions of a text: the rows of the table without those before `first_position`."""
    first_position: int
    """The row of the first token; RoBERTa keeps the rows before it for padding."""
    num_token_types: int
    """Rows of the table of token types; 0: the family has none."""
    norm_eps: float
    activation: EncoderActivation

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads
