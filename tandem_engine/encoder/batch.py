"""Defines what an encoder takes and returns for the inputs of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem_engine.encoder.messages import EncoderInfo, Pooling

TokenIds = NDArray[np.uint32]
Values = NDArray[np.float32]


@dataclass(frozen=True)
class EncoderInput:
    """One checked text, or pair of texts."""

    token_ids: TokenIds
    """[num_tokens], at least one."""
    num_first_tokens: int
    """Of a pair: tokens of the first text; 0: one text."""
    pooling: Pooling | None = None
    """None: the model's."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Encoder(Protocol):
    """A loaded model; for one thread."""

    @property
    def info(self) -> EncoderInfo: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int:
        """Longest input, in tokens."""
        ...

    def encode(self, inputs: Sequence[EncoderInput]) -> Values:
        """Return [len(inputs), num_values]. An input's bits do not depend on the inputs beside it."""
        ...
