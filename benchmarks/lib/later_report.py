"""Finds out which report of a service, as `GET /v1/workers` shows it, was made after a moment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

_NUM_LATER = 3
"""Heartbeats that must have come since. The first may have been made before: it may come through its host's KV service,
which passes it on up to half a second later, and later still on a busy machine. They are made a second apart."""


class LaterReport:
    """Waits for a report that was made after this object.

    A row tells how old its heartbeat was at some moment between the question and the answer. So of two rows the second
    has another heartbeat only if even its earliest moment is after the latest one of the first.
    """

    def __init__(self) -> None:
        self._asked_after = self._latest = time.monotonic()
        self._num_later = 0

    def is_in(self, row: Mapping[str, Any]) -> bool:
        """Return whether the row of the service shows such a report; call it with each row, in the order of reading."""
        now, age = time.monotonic(), float(row["heartbeat_age_seconds"])
        earliest, self._asked_after = self._asked_after - age, now
        if earliest > self._latest:
            self._latest = now - age
            self._num_later += 1
        return self._num_later >= _NUM_LATER
