"""Computes the ratio of medians of two samples, with its 95 % interval. Pure.

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


def ratio_of_medians(old: Sequence[float], new: Sequence[float], *, is_time: bool) -> Ratio:
    """Compare two samples; equal samples always give equal intervals. Raises ValueError for fewer than two values."""
    if min(len(old), len(new)) < 2:
        raise ValueError(f"{len(old)} old and {len(new)} new values; an interval needs at least two of each")
    better, worse = (old, new) if is_time else (new, old)
    above, below = np.asarray(better, float), np.asarray(worse, float)
    ratios = _resampled_medians(above, _SEED) / _resampled_medians(below, _SEED + 1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(float(np.median(above) / np.median(below)), float(low), float(high))


def _resampled_medians(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return the medians of resamples with replacement, [num_resamples]."""
    picks = np.random.default_rng(seed).integers(0, len(values), (_NUM_RESAMPLES, len(values)))
    return np.asarray(np.median(values[picks], axis=1), float)
