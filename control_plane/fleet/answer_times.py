"""Keeps how fast the workers of one model and role answered lately, and what is usual among a worker's peers."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median

import msgspec

_MAX_SAMPLES = 128
_MIN_SAMPLES = 5
"""Fewer answers of peers say nothing."""
_SHORTEST_PREDICTION_SECONDS = 0.001


class AnswerTime(msgspec.Struct, frozen=True, gc=False):
    """What one call showed."""

    incarnation: str
    sent_at: float
    accept_seconds: float
    """From Submit to acceptance."""
    ratio: float
    """The seconds to the first token, divided by the predicted ones."""


@dataclass(frozen=True, slots=True)
class Usual:
    """What is usual among some workers."""

    num_workers: int
    accept_seconds: float
    """The median."""
    late_accept_seconds: float
    """The 90th percentile."""
    ratio: float
    late_ratio: float

    def expected_seconds(self, predicted_seconds: float) -> float:
        """Return when half of these workers would have brought the first token."""
        return expected_seconds(self.ratio, predicted_seconds)

    def late_seconds(self, predicted_seconds: float) -> float:
        """Return when nine of ten first tokens would have come."""
        return self.late_ratio * max(_SHORTEST_PREDICTION_SECONDS, predicted_seconds)


class AnswerTimes:
    """The latest answers of the workers of one model and role."""

    def __init__(self) -> None:
        self._samples: deque[AnswerTime] = deque()
        self._ratios: list[float] = []
        """Of all samples, ascending: routing asks for their median in most decisions."""

    def add(
        self,
        incarnation: str,
        sent_at: float,
        accept_seconds: float,
        first_token_seconds: float,
        predicted_seconds: float,
    ) -> None:
        """Take in a first token."""
        ratio = first_token_seconds / max(_SHORTEST_PREDICTION_SECONDS, predicted_seconds)
        self._samples.append(AnswerTime(incarnation, sent_at, accept_seconds, ratio))
        insort(self._ratios, ratio)
        if len(self._samples) > _MAX_SAMPLES:
            del self._ratios[bisect_left(self._ratios, self._samples.popleft().ratio)]

    def forget(self, incarnation: str) -> None:
        self._samples = deque(each for each in self._samples if each.incarnation != incarnation)
        self._ratios = sorted(each.ratio for each in self._samples)

    def usual_ratio(self, without: Collection[str]) -> float | None:
        """Return `usual(without).ratio`, quickly if all workers count; None if they have answered too little."""
        ratios = self._ratios
        if without:
            ratios = sorted([each.ratio for each in self._samples if each.incarnation not in without])
        middle, is_odd = divmod(len(ratios), 2)
        if len(ratios) < _MIN_SAMPLES:
            return None
        return ratios[middle] if is_odd else (ratios[middle - 1] + ratios[middle]) / 2

    def usual(self, without: Collection[str]) -> Usual | None:
        """Return what is usual among the other workers than `without`; None if they have answered too little."""
        of_peers = [each for each in self._samples if each.incarnation not in without]
        if len(of_peers) < _MIN_SAMPLES:
            return None
        accepts, ratios = [each.accept_seconds for each in of_peers], [each.ratio for each in of_peers]
        return Usual(
            len({each.incarnation for each in of_peers}), median(accepts), _late(accepts), median(ratios), _late(ratios)
        )

    def num_since(self, moment: float, without: str) -> int:
        """Return how many calls that were sent to other workers after `moment` have had their first token."""
        return sum(each.sent_at >= moment and each.incarnation != without for each in self._samples)


def expected_seconds(ratio: float, predicted_seconds: float) -> float:
    """Return the seconds to a first token, at so many times the predicted ones."""
    return ratio * max(_SHORTEST_PREDICTION_SECONDS, predicted_seconds)


def _late(values: list[float]) -> float:
    return sorted(values)[(9 * len(values)) // 10]
