"""Defines the input and output of the op that samples tokens.

    logits -> changes -> temperature -> top-k -> top-p -> min-p -> plus Gumbel noise -> argmax, the lower id on ties

Top-k and top-p keep a prefix of the tokens by falling logit, the lower id first among equals. Top-p keeps a token while
the tokens before it hold less than that share. Probabilities are rounded to whole numbers, 2^40 for the likeliest, so
that sums are exact in any order. Noise is counter-based (Salmon et al., 2011): Philox4x64-10 keyed by (seed, position),
its n-th word for token id n. An argmax over logits plus Gumbel noise is a sample of their softmax (Maddison et al.,
2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MIN_TEMPERATURE = 1e-6
"""The lowest temperature but 0; lower values are raised to it: float32 logits are no finer."""

TokenIds = np.ndarray[tuple[int], np.dtype[np.int64]]
Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Words = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True)
class LogitChanges:
    """Changes of some logits before sampling, computed in float64 and rounded to float32 once.

    1. Add `bias`. 2. If `is_seen`, divide positive logits by `repetition_penalty` and multiply others by it.
    3. Subtract `minus`, which is infinite for a banned token.
    """

    token_ids: TokenIds
    """All different, each in the vocabulary; the other arrays have the same length."""
    bias: Numbers
    is_seen: Flags
    minus: Numbers
    repetition_penalty: float = 1.0


class SamplingRow(NamedTuple):
    """How tokens are sampled from one row of logits: one per seed, for one position."""

    seeds: Sequence[int]
    position: int
    temperature: float = 1.0
    """0: the largest logit; the other fields then have no effect."""
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    changes: LogitChanges | None = None
    allowed: Words | None = None
    """A token i is allowed if word i // 32 exists and its bit i % 32 is set; None: all tokens are allowed."""
    num_top: int | None = None
    """Number of top log probabilities; None: no log probabilities, not even of the sampled tokens."""


class TokenLogprob(NamedTuple):
    """A token's log probability before any change of the logits; rank 1 is the likeliest, equals share a rank."""

    token_id: int
    logprob: float
    rank: int


def is_plain_greedy(row: SamplingRow) -> bool:
    """Return whether the row's tokens are those of its largest logit, and nothing else is asked."""
    return row.temperature == 0.0 and row.changes is None and row.allowed is None and row.num_top is None


class RowSample(NamedTuple):
    """The result of one row."""

    token_ids: Sequence[int]
    """One per seed."""
    chosen: Sequence[TokenLogprob] = ()
    """Log probabilities of `token_ids`, if requested."""
    top: Sequence[TokenLogprob] = ()
    """The likeliest tokens by falling probability, without tokens of probability 0."""


class UnusableLogits(Exception):
    """No token can be sampled from these rows: a logit is NaN or infinite, or every token is banned."""

    def __init__(self, rows: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.rows = tuple(rows)
        self.message = message


def refuse(not_numbers: Sequence[int], nothing_left: Sequence[int]) -> None:
    """Raise UnusableLogits unless both lists are empty."""
    if not_numbers:
        raise UnusableLogits(not_numbers, "the model's logits are not numbers (NaN or infinite)")
    if nothing_left:
        raise UnusableLogits(nothing_left, "no token is left to sample: all of them are banned")
