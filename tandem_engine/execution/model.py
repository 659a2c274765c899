"""What does a step need of a model, whichever route it came by?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tandem_engine.ops.base import KVPool, Step


def ignore() -> None:
    """Nobody waits for this step's keys and values."""


class Model(Protocol):
    def forward(
        self,
        token_ids: torch.Tensor,
        step: Step,
        pool: KVPool,
        sample_rows: torch.Tensor,
        kv_written: Callable[[], None] = ignore,
    ) -> torch.Tensor:
        """Write the KV of a step's tokens and return the logits of some: [num_sampled, vocab_size].

        `token_ids` [num_tokens] and `sample_rows` [num_sampled] are int64 on the model's device. `kv_written` is called
        once, as soon as the last layer's keys and values are in their blocks. Called under `torch.inference_mode`.
        """
        ...
