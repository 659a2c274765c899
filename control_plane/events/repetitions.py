"""Sums lines of the log that come too often: of each kind and cause, a few in a window are events of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from control_plane.events.kinds import Kind

_MAX_SUMS = 200
"""Different kinds and causes at a time; more causes of one kind share a sum."""


@dataclass
class _Window:
    kind: Kind
    ends_at: float
    num_passed: int = 0
    num_summed: int = 0
    last: dict[str, Any] = field(default_factory=dict)

    def add(self, values: Mapping[str, Any]) -> None:
        highest = self.kind.highest
        before = self.last.get(highest)
        self.num_summed += 1
        self.last = dict(values)
        if before is not None:
            self.last[highest] = max(before, self.last.get(highest, before))


class Repetitions:
    """May be called in any thread: lines of the log come in all of them. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[tuple[str, str], _Window] = {}

    def passes(self, kind: Kind, values: Mapping[str, Any]) -> bool:
        """Return whether a line is an event of its own; else it is in the sum of its window."""
        key = kind.name, str(values.get(kind.cause, "")) if kind.cause else ""
        with self._lock:
            if key not in self._windows and len(self._windows) >= _MAX_SUMS:
                key = kind.name, ""
            window = self._windows.get(key)
            if window is None:
                window = self._windows[key] = _Window(kind, self._clock() + kind.window_seconds)
            if window.num_passed < kind.per_window:
                window.num_passed += 1
                return True
            window.add(values)
            return False

    def ended(self, *, at_once: bool = False) -> list[tuple[str, dict[str, Any]]]:
        """Return the kinds and values of the sums whose window has ended, with their number as `repeated`.

        `at_once`: all sums, because the gateway ends.
        """
        now = self._clock()
        with self._lock:
            over = [key for key, window in self._windows.items() if at_once or now >= window.ends_at]
            windows = [self._windows.pop(key) for key in over]
        return [
            (window.kind.name, {**window.last, "repeated": window.num_summed})
            for window in windows
            if window.num_summed
        ]
