"""What is asked of the op that draws tokens, and what does it answer?

    logits -> changes -> temperature -> top-k -> top-p -> min-p -> plus Gumbel noise -> argmax, the lower id on ties

Top-k and top-p keep the first so many by falling logit, the lower id first among equals. Top-p keeps a token while
those before it hold less than that share; probabilities are rounded to whole numbers, 2^40 for the likeliest, so that
sums are exact in any order. Noise is counter-based (Salmon et al., 2011): Philox4x64-10 keyed by (seed, position), its
n-th word for token id n. An argmax over logits plus Gumbel noise is a draw from their softmax (Maddison et al., 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MIN_TEMPERATURE = 1e-6
"""Lower ones but 0 count as this one: float32 logits are no finer."""

TokenIds = np.ndarray[tuple[int], np.dtype[np.int64]]
Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Words = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True)
class LogitChanges:
    """What becomes of some logits before they are drawn from, computed in float64 and rounded to float32 once.

    Plus `bias`; if `is_seen`, by `repetition_penalty` divided where positive and multiplied elsewhere; less `minus`,
    infinity for a token that may not be drawn.
    """

    token_ids: TokenIds
    """All different, each in the vocabulary; so long are the others, too."""
    bias: Numbers
    is_seen: Flags
    minus: Numbers
    repetition_penalty: float = 1.0


class SamplingRow(NamedTuple):
    """How tokens are drawn from one row of logits: one per seed, for one position."""

    seeds: Sequence[int]
    position: int
    temperature: float = 1.0
    """0: the largest logit, whatever else is asked."""
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    changes: LogitChanges | None = None
    allowed: Words | None = None
    """Token i may be drawn if bit i % 32 of word i // 32 is set, and not if there is no such word; None: all may."""
    num_top: int | None = None
    """Of log probabilities; None: not even those of the drawn tokens."""


class TokenLogprob(NamedTuple):
    """A token's log probability by the logits before any change; rank 1 is the likeliest, equals share a rank."""

    token_id: int
    logprob: float
    rank: int


class Drawn(NamedTuple):
    """What one row gave."""

    token_ids: Sequence[int]
    """One per seed."""
    chosen: Sequence[TokenLogprob] = ()
    """Of `token_ids`, if log probabilities were asked for."""
    top: Sequence[TokenLogprob] = ()
    """The likeliest by falling probability, without those of probability 0."""


class UnusableLogits(Exception):
    """Nothing can be drawn from these rows: a logit is NaN or infinite, or every token is ruled out."""

    def __init__(self, rows: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.rows = tuple(rows)
        self.message = message


def refuse(not_numbers: Sequence[int], nothing_left: Sequence[int]) -> None:
    """Raise UnusableLogits if any rows are named."""
    if not_numbers:
        raise UnusableLogits(not_numbers, "the model's logits are not numbers (NaN or infinite)")
    if nothing_left:
        raise UnusableLogits(nothing_left, "no token is left to draw: all of them are ruled out")
