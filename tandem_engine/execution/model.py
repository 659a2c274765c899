"""Defines what a step needs of a model, whatever route loaded it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tandem_engine.ops.base import KVPool, Step


def ignore() -> None:
    """Do nothing: no other process waits for this step's keys and values."""


class Model(Protocol):
    def forward(
        self,
        token_ids: torch.Tensor,
        step: Step,
        pool: KVPool,
        sample_rows: torch.Tensor,
        kv_written: Callable[[], None] = ignore,
    ) -> torch.Tensor:
        """Write the KV of a step's tokens and return the logits of `sample_rows`: [num_sampled, vocab_size].

        `token_ids` [num_tokens] and `sample_rows` [num_sampled] are int64 on the model's device. Calls `kv_written`
        once, as soon as the last layer's keys and values are in their blocks. Must run under `torch.inference_mode`.
        """
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token's bits depend on its own request alone, never on the batch. Else drafts are off."""
        ...
