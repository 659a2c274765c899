"""Measures how much device time each account asks for."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

_HALF_LIFE_SECONDS = 10.0
_LEAST_SECONDS = 1.0
"""In which the first requests are taken to have come."""
_MAX_KEPT = 1000


Asker = tuple[int, str]
"""A class of requests, and an account."""


class Demands:
    """Device milliseconds per second that the requests of each account and class take, of those that wait or start."""

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        """`max_kept`: askers; the ones that asked least recently are dropped."""
        self._max_kept = max_kept
        self._began_at: float | None = None
        self._sums: OrderedDict[Asker, tuple[float, float]] = OrderedDict()
        """A sum that halves in each half-life, and when it was right."""

    def asked(self, asker: Asker, cost_ms: float, now: float) -> None:
        self._began_at = now if self._began_at is None else self._began_at
        self._sums[asker] = self._sum_ms(asker, now) + cost_ms, now
        self._sums.move_to_end(asker)
        if len(self._sums) > self._max_kept:
            self._sums.popitem(last=False)

    def ms_per_second(self, asker: Asker, now: float) -> float:
        """Return the rate; at first that since the first request of anybody."""
        seconds = max(_LEAST_SECONDS, now - (now if self._began_at is None else self._began_at))
        counted_seconds = (1 - 0.5 ** (seconds / _HALF_LIFE_SECONDS)) * _HALF_LIFE_SECONDS / math.log(2)
        return self._sum_ms(asker, now) / counted_seconds

    def scale(self, factor: float) -> None:
        """The unit of costs has changed."""
        for asker, (sum_ms, at) in self._sums.items():
            self._sums[asker] = sum_ms * factor, at

    def __iter__(self) -> Iterator[Asker]:
        return iter(self._sums)

    def _sum_ms(self, asker: Asker, now: float) -> float:
        sum_ms, at = self._sums.get(asker, (0.0, now))
        return sum_ms * 0.5 ** (max(0.0, now - at) / _HALF_LIFE_SECONDS)
