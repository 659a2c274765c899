"""Measures how much device time each account asks for."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

_HALF_LIFE_SECONDS = 10.0
_MAX_KEPT = 1000


Asker = tuple[int, str]
"""A class of requests, and an account."""


class Demands:
    """Device milliseconds per second that the requests of each account and class take, of those that wait or start."""

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        """`max_kept`: askers; the ones that asked least recently are dropped."""
        self._max_kept = max_kept
        self._sums: OrderedDict[Asker, tuple[float, float]] = OrderedDict()
        """A sum that halves in each half-life, and when it was right."""

    def asked(self, asker: Asker, cost_ms: float, now: float) -> None:
        self._sums[asker] = self._sum_ms(asker, now) + cost_ms, now
        self._sums.move_to_end(asker)
        if len(self._sums) > self._max_kept:
            self._sums.popitem(last=False)

    def ms_per_second(self, asker: Asker, now: float) -> float:
        return self._sum_ms(asker, now) * math.log(2) / _HALF_LIFE_SECONDS

    def scale(self, factor: float) -> None:
        """The unit of costs has changed."""
        for asker, (sum_ms, at) in self._sums.items():
            self._sums[asker] = sum_ms * factor, at

    def __iter__(self) -> Iterator[Asker]:
        return iter(self._sums)

    def _sum_ms(self, asker: Asker, now: float) -> float:
        sum_ms, at = self._sums.get(asker, (0.0, now))
        return sum_ms * 0.5 ** (max(0.0, now - at) / _HALF_LIFE_SECONDS)
