"""Turns token vectors into what a model's task returns: embeddings, classes or a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from tandem_engine.encoder.messages import EncoderInfo, Pooling
from tandem_engine.encoder.pooling import normalized, pool
from tandem_engine.ops.base import Ops, Weight

Scores = Literal["softmax", "sigmoid", "raw"]


class Head(Protocol):
    @property
    def info(self) -> EncoderInfo: ...

    def forward(self, hidden: torch.Tensor, starts: torch.Tensor, poolings: Sequence[Pooling | None]) -> torch.Tensor:
        """Return [num_runs, num_values], float32; `hidden` [num_tokens, hidden_size]."""
        ...


@dataclass(frozen=True)
class EmbeddingHead:
    info: EncoderInfo
    pooling: Pooling

    def forward(self, hidden: torch.Tensor, starts: torch.Tensor, poolings: Sequence[Pooling | None]) -> torch.Tensor:
        pooled = pool(hidden, starts, [each or self.pooling for each in poolings])
        return normalized(pooled) if self.info.is_normalized else pooled


@dataclass(frozen=True)
class ClassificationHead:
    """The head of `*ForSequenceClassification`: two linear layers on each run's first token."""

    info: EncoderInfo
    ops: Ops
    dense: Weight
    activation: Callable[[torch.Tensor], torch.Tensor]
    output: Weight
    scores: Scores

    def forward(self, hidden: torch.Tensor, starts: torch.Tensor, poolings: Sequence[Pooling | None]) -> torch.Tensor:
        first = hidden.index_select(0, starts[:-1].to(hidden.device))
        logits = self.ops.linear(self.activation(self.ops.linear(first, self.dense)), self.output)
        match self.scores:
            case "raw":
                return logits
            case "sigmoid":
                return 1 / logits.neg_().exp_().add_(1)
            case "softmax":
                weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
                return weights / weights.sum(-1, keepdim=True)
