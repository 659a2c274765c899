"""Measures how much device time each account asks for."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

_HALF_LIFE_SECONDS = 10.0
_LEAST_SECONDS = 1.0
"""In which the first requests are taken to have come."""
_MAX_KEPT = 256
_LONGEST_SECONDS = 100 * _HALF_LIFE_SECONDS
_LEAST_RATE = 0.01
"""Of devices, in milliseconds a second: less is nothing."""

Asker = tuple[int, str]
"""A class of requests, and an account."""


class Demands:
    """Device milliseconds per second that the requests of each account and class take, of those that wait or start.

    A request counts half as much with each half-life. Instead of letting all sums shrink, later requests count more:
    all are read with one factor.
    """

    def __init__(self, max_kept: int = _MAX_KEPT, began_at: float | None = None) -> None:
        """`max_kept`: askers; the ones that asked least recently are dropped.

        `began_at`: when the first request of anybody may have come; None: with the first that is told.
        """
        self._max_kept = max_kept
        self.began_at = began_at
        self._base = began_at or 0.0
        """When a request counts as it is."""
        self._sums: OrderedDict[Asker, float] = OrderedDict()

    def asked(self, asker: Asker, cost_ms: float, now: float) -> None:
        if self.began_at is None:
            self.began_at = self._base = now
        if now - self._base > _LONGEST_SECONDS:
            factor, self._base = self._weight(now), now
            self.scale(1 / factor)
        self._sums[asker] = self._sums.get(asker, 0.0) + cost_ms * self._weight(now)
        self._sums.move_to_end(asker)
        if len(self._sums) > self._max_kept:
            self._sums.popitem(last=False)

    def rates(self, now: float) -> Iterator[tuple[Asker, float]]:
        """Yield who asks, and for how much; at first what was asked since the first request of anybody."""
        seconds = max(_LEAST_SECONDS, now - (now if self.began_at is None else self.began_at))
        counted_seconds = (1 - 0.5 ** (seconds / _HALF_LIFE_SECONDS)) * _HALF_LIFE_SECONDS / math.log(2)
        factor = 1 / (self._weight(now) * counted_seconds)
        for asker, weighted in self._sums.items():
            if (rate := weighted * factor) > _LEAST_RATE:
                yield asker, rate

    def scale(self, factor: float) -> None:
        """The unit of costs has changed."""
        for asker in self._sums:
            self._sums[asker] *= factor

    def _weight(self, now: float) -> float:
        return float(2.0 ** min(900.0, (now - self._base) / _HALF_LIFE_SECONDS))
