"""Measures how fast waiting requests of a model are let in, to predict how long the next ones wait."""

from __future__ import annotations

import math
from dataclasses import dataclass

_HALF_LIFE_SECONDS = 10.0
"""The rate forgets a half in so long a time in which any waited."""
_MIN_LET_IN, _MIN_SECONDS = 4, 0.5
"""Before the rate is known."""
_LULL_SECONDS = 10.0
"""Without a waiting request: then what was measured is forgotten. It may have been a hung worker's rate."""
_LEAST_GAP_SECONDS, _MOST_GAPS = 1.0, 8.0
"""So long may pass between two requests that are let in, or as many mean gaps, and no more than all gaps before.

What is longer is a hang, and no measure of a rate."""


@dataclass
class LetInRate:
    """The work of waiting requests that is let in per second of a worker's time, at all gateways, while any waits here.

    Work is in tokens of an answer. What is measured is what workers can do, whichever gateways use it, and holds when
    there are more of them.

    Times without a waiting request do not count: then the rate is that of arrivals, and tells nothing. Times without
    a worker do not count either, nor times in which workers hang: who waits then waits for a worker.
    """

    _num_workers: int = 1
    _busy_since: float | None = None
    _idle_since: float = -math.inf
    _seconds: float = 0.0
    """Of workers, while any waited; the sums forget what is long ago."""
    _gaps: float = 0.0
    """Seconds of the clock in that."""
    _gap: float = 0.0
    """Seconds that count since the last request was let in."""
    _longest_gap: float = _LEAST_GAP_SECONDS
    _work: float = 0.0
    _num_recent: float = 0.0
    """Requests of that sum, forgotten as it is."""
    _num_let_in: int = 0

    @property
    def is_measured(self) -> bool:
        """Whether enough were let in."""
        return self._num_let_in >= _MIN_LET_IN and self._seconds >= _MIN_SECONDS

    @property
    def mean_work(self) -> float:
        """Return the work of a request that was let in, on average."""
        return self._work / self._num_recent if self._num_recent else 0.0

    def per_second(self, now: float) -> float:
        """Return the work that is let in per second now; 0.0 while too little is known, and without a worker."""
        self._advance(now)
        if not self.is_measured or not self._num_workers:
            return 0.0
        return self._work / self._seconds * self._num_workers

    def changed(self, num_workers: int, now: float) -> None:
        """From now on there are so many workers."""
        self._advance(now)
        self._num_workers = num_workers

    def waits(self, now: float) -> None:
        """At least one request waits from now on."""
        self._advance(now)
        if self._busy_since is None and now - self._idle_since > _LULL_SECONDS:
            self._seconds = self._gaps = self._work = self._num_recent = 0.0
            self._num_let_in, self._longest_gap = 0, _LEAST_GAP_SECONDS
        if self._busy_since is None:
            self._gap = 0.0
        self._busy_since = now

    def nobody_waits(self, now: float) -> None:
        self._advance(now)
        self._busy_since, self._idle_since = None, now

    def let_in(self, work: float, now: float, num_requests: int = 1) -> None:
        """Requests that have so much work together were let in, here or at other gateways."""
        self._advance(now)
        self._work += work
        self._num_recent += num_requests
        self._num_let_in += num_requests
        self._gap = 0.0
        self._longest_gap = max(_LEAST_GAP_SECONDS, self._gaps * min(1.0, _MOST_GAPS / self._num_recent))

    def take_back(self, work: float) -> None:
        self._work = max(0.0, self._work - work)
        self._num_recent = max(0.0, self._num_recent - 1)
        self._num_let_in -= 1

    def _advance(self, now: float) -> None:
        if self._busy_since is None:
            return
        seconds = 0.0
        if self._num_workers:
            seconds = max(0.0, min(now - self._busy_since, self._longest_gap - self._gap))
        kept = 0.5 ** (seconds / _HALF_LIFE_SECONDS)
        self._seconds = self._seconds * kept + seconds * self._num_workers
        self._gaps = self._gaps * kept + seconds
        self._work *= kept
        self._num_recent *= kept
        self._gap += seconds
        self._busy_since = now
