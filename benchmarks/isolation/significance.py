"""Compares two samples of times: the size of a difference, and its p value. Pure.

AUC is the probability that a value of the first sample is below one of the second (ties count half): 0.5 says that one
cannot tell them apart, 1.0 that one always can. It is the Mann-Whitney U statistic divided by the number of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_SHUFFLES = 20_000
_SHUFFLES_AT_ONCE = 500
_TWO_SIDED_95 = 1.959964
_SEED = 1
_ROUNDING = 1e-9
"""Ranks are halves: what differs by less is equal."""


@dataclass(frozen=True)
class Comparison:
    """Two-sided; the confidence interval of the AUC is at 95 %."""

    auc: float
    auc_low: float
    auc_high: float
    p_value: float
    num_first: int
    num_second: int


def compare(first: Sequence[float], second: Sequence[float], num_shuffles: int = NUM_SHUFFLES) -> Comparison:
    """Compare two independent samples; the same ones always compare alike.

    Raises ValueError for fewer than two values of either.

    The p value is the share of random labellings whose AUC is at least as far from 0.5, the real one among them
    (Phipson and Smyth, "Permutation P-values should never be zero", 2010). The interval is DeLong's (Biometrics 1988);
    samples that do not overlap at all have none.
    """
    if min(len(first), len(second)) < 2:
        raise ValueError(f"{len(first)} and {len(second)} values; two of each at least, to see how much they vary")
    is_below = _is_below(np.asarray(first, float), np.asarray(second, float))
    auc = float(is_below.mean())
    margin = _TWO_SIDED_95 * _standard_error(is_below)
    p_value = _p_value(np.asarray([*first, *second], float), len(first), num_shuffles)
    return Comparison(auc, max(0.0, auc - margin), min(1.0, auc + margin), p_value, len(first), len(second))


def _is_below(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 where a first value is below a second, 0.5 where they are equal, else 0; [num_first, num_second]."""
    return np.asarray((first[:, None] < second[None, :]) + 0.5 * (first[:, None] == second[None, :]))


def _standard_error(is_below: NDArray[np.float64]) -> float:
    """Return that of the AUC: the means of rows vary with the first sample, those of columns with the second."""
    num_first, num_second = is_below.shape
    by_first, by_second = is_below.mean(axis=1), is_below.mean(axis=0)
    return float(np.sqrt(by_first.var(ddof=1) / num_first + by_second.var(ddof=1) / num_second))


def _p_value(values: NDArray[np.float64], num_first: int, num_shuffles: int) -> float:
    ranks = _ranks(values)
    expected = ranks.mean() * num_first
    observed = abs(ranks[:num_first].sum() - expected)
    chance = np.random.default_rng(_SEED)
    num_as_far = 0
    for start in range(0, num_shuffles, _SHUFFLES_AT_ONCE):
        num_rows = min(_SHUFFLES_AT_ONCE, num_shuffles - start)
        shuffled = chance.permuted(np.tile(ranks, (num_rows, 1)), axis=1)
        sums = shuffled[:, :num_first].sum(axis=1)
        num_as_far += int((np.abs(sums - expected) >= observed - _ROUNDING).sum())
    return (1 + num_as_far) / (1 + num_shuffles)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each value's place in order; equal ones have the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[places], float)
