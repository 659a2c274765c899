"""Computes the ratio of two samples, with its 95 % interval: of their medians, or turn by turn. Pure.

A ratio is new/old for rates and old/new for times, so below 1 is worse. The interval is the percentile bootstrap's
(Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

MAX_WIDTH = 0.10
WORSE_BELOW = 0.97
_NUM_RESAMPLES = 20_000
_SEED = 1

Verdict = Literal["worse", "not worse", "no result"]


@dataclass(frozen=True)
class Ratio:
    """The ratio of two medians and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """`worse`: the interval is wholly below 0.97. `no result`: the interval is wider than 0.10."""
        if self.high - self.low > MAX_WIDTH:
            return "no result"
        return "worse" if self.high < WORSE_BELOW else "not worse"


def ratio_of_medians(old: Sequence[float], new: Sequence[float], *, is_time: bool, are_turns: bool = False) -> Ratio:
    """Compare two samples; equal samples always give equal intervals.

    With `are_turns`, turn `i` of both sides ran within the same seconds, so a resample takes whole turns: what the two
    sides share does not widen the interval. Raises ValueError for fewer than two values, turns of one side only, or a
    value that is not positive.
    """
    if min(len(old), len(new)) < 2 or (are_turns and len(old) != len(new)):
        raise ValueError(f"{len(old)} old and {len(new)} new values; an interval needs two of each, turns as many")
    if min(*old, *new) <= 0:
        raise ValueError("a value is 0 or less; a rate or a time that was measured is positive")
    better, worse = (old, new) if is_time else (new, old)
    above, below = np.asarray(better, float), np.asarray(worse, float)
    ratios = _resampled_medians(above, _SEED) / _resampled_medians(below, _SEED if are_turns else _SEED + 1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(float(np.median(above) / np.median(below)), float(low), float(high))


def median_of_ratios(old: Sequence[float], new: Sequence[float], *, is_time: bool) -> Ratio:
    """Compare turns one by one: the median of their ratios, with its interval.

    Turn `i` of both sides ran within the same seconds, so what changes the machine's speed cancels. Raises ValueError
    for samples of unequal length or fewer than two values.
    """
    if len(old) != len(new) or len(old) < 2:
        raise ValueError(f"{len(old)} old and {len(new)} new values; pairs need the same number, at least two")
    better, worse = (old, new) if is_time else (new, old)
    ratios = np.asarray(better, float) / np.asarray(worse, float)
    low, high = np.percentile(_resampled_medians(ratios, _SEED), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def ratio_of_sums(old_seconds: Sequence[float], new_seconds: Sequence[float]) -> Ratio:
    """Return by which factor the same pieces of work took less time, old/new; the interval resamples the pieces."""
    old, new = np.asarray(old_seconds, float), np.asarray(new_seconds, float)
    picks = np.random.default_rng(_SEED).integers(0, len(old), (_NUM_RESAMPLES, len(old)))
    low, high = np.percentile(old[picks].sum(axis=1) / new[picks].sum(axis=1), [2.5, 97.5])
    return Ratio(float(old.sum() / new.sum()), float(low), float(high))


def _resampled_medians(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return the medians of resamples with replacement, [num_resamples]; a seed takes the same places of any sample."""
    picks = np.random.default_rng(seed).integers(0, len(values), (_NUM_RESAMPLES, len(values)))
    return np.asarray(np.median(values[picks], axis=1), float)
