"""The clock of leases: it stands still while the process does.

A process that was stopped (SIGSTOP, a paused virtual machine, swap) wakes with renewals waiting in its sockets. By a
clock that went on meanwhile, the first sweep would end what these renewals are about to extend.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tandem_runtime.log import get_logger

log = get_logger(__name__)

LONGEST_GAP_SECONDS = 1.0
"""Without a reading for longer, the process stood still: the sweep reads the clock four times a second."""


class ServiceClock:
    """Seconds since the epoch at the start, and on from there; without the time in which nobody could read the clock.

    Not the time of day: changes of the machine's clock do not move it. For one event loop.
    """

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, unix_time: Callable[[], float] = time.time
    ) -> None:
        self._monotonic = monotonic
        self._last_read = monotonic()
        self._offset = unix_time() - self._last_read

    def __call__(self) -> float:
        """Return the time, in seconds; leave out a gap of more than 1 s since the last reading."""
        now = self._monotonic()
        gap = now - self._last_read
        self._last_read = now
        if gap > LONGEST_GAP_SECONDS:
            self._offset -= gap
            log.warning("kv_service_stood_still", seconds=round(gap, 1))
        return now + self._offset

    @property
    def unread(self) -> float:
        """The time, without counting as a reading."""
        return self._monotonic() + self._offset
