"""Compares answers, and finds the steps in which a whole batch was answered. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

_MIN_GAPS = 4


def steady_gaps(token_times: Sequence[Sequence[float]]) -> list[float]:
    """Return the gaps between the tokens of the request that began last, while all requests are answered.

    `token_times` has the times of each request's tokens. Raises ValueError if fewer than four gaps are left.
    """
    last = max(token_times, key=lambda times: times[0])
    ended = min(times[-1] for times in token_times)
    inside = [time for time in last if time <= ended]
    gaps = [later - earlier for earlier, later in pairwise(inside)]
    if len(gaps) < _MIN_GAPS:
        raise ValueError(f"{len(gaps)} steps had the whole batch, at least {_MIN_GAPS} are needed: longer answers")
    return gaps


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """Return the index of the first token that differs; None if all are equal."""
    for index, (one, other) in enumerate(zip(ours, reference, strict=True)):
        if one != other:
            return index
    return None


def margin(chosen: float, top: Mapping[int, float], other: int) -> float | None:
    """Return by how much the reference's token leads the other one, in log probability; None: not among its top."""
    return chosen - top[other] if other in top else None


def parity(
    ours: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    chosen: Sequence[Sequence[float]],
    tops: Sequence[Sequence[Mapping[int, float]]],
) -> dict[str, Any]:
    """Return how many answers equal the reference's to their end, and where and how narrowly the others leave it.

    `chosen` and `tops` are the reference's log probabilities, one per token: of its own token, and of its most likely.
    """
    differences = []
    for number, (one, other) in enumerate(zip(ours, reference, strict=True)):
        index = first_difference(one, other)
        if index is not None:
            lead = margin(chosen[number][index], tops[number][index], one[index])
            differences.append({"answer": number, "token": index, "margin": lead})
    margins = [each["margin"] for each in differences if each["margin"] is not None]
    return {
        "num_answers": len(ours),
        "equal_share": 1 - len(differences) / len(ours),
        "differences": differences,
        "largest_margin": max(margins, default=0.0),
        "num_beyond_top": len(differences) - len(margins),
    }


def equal_share(ours: Sequence[object], others: Sequence[object]) -> float:
    """Return the share of equal answers."""
    return sum(one == other for one, other in zip(ours, others, strict=True)) / len(ours)


def ratio_of_medians(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    return median(numerators) / median(denominators)
