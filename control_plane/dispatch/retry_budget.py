"""How often may requests that lost a worker be sent again, so that a crash loop does not multiply the load?"""

from __future__ import annotations

import time
from collections.abc import Callable

from tandem_runtime.errors import Overloaded

_SHARE_OF_REQUESTS = 0.2
_BURST = 100
_BURST_SECONDS = 10.0


class RetryBudget:
    """A token bucket: a fifth of the requests, and a hundred in any ten seconds.

    What a request or a choice loses first is free: at most it is done twice, and a worker that dies with hundreds of
    streams stops none of them.
    """

    def __init__(self, burst: int = _BURST, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._clock = clock
        self._num_left = float(burst)
        self._filled_at = clock()

    def earn(self) -> None:
        """A new request has come."""
        self._fill(_SHARE_OF_REQUESTS)

    def take(self, *, is_first: bool) -> None:
        """Spend one retry; raises Overloaded while there is none."""
        self._fill(0.0)
        if is_first:
            return
        if self._num_left < 1:
            raise Overloaded(
                "too many requests have lost their workers and are being sent again; try again later",
                retry_after_seconds=_BURST_SECONDS / self._burst,
            )
        self._num_left -= 1

    def _fill(self, earned: float) -> None:
        now = self._clock()
        earned += (now - self._filled_at) * self._burst / _BURST_SECONDS
        self._filled_at = now
        self._num_left = min(float(self._burst), self._num_left + earned)
