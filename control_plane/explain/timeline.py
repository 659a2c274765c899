"""Marks when an HTTP request reached which point, by this machine's monotonic clock.

A mark costs some hundred nanoseconds, and a token none. The clock is `time.perf_counter`.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

_MAX_LAPS = 32


class Lap(NamedTuple):
    """A stretch of time. It begins where the one before it ended."""

    name: str
    ended_at: float
    worker: str = ""


class Laps:
    """Stretches of time without gaps between them; a bounded number."""

    __slots__ = ("laps",)

    def __init__(self) -> None:
        self.laps: list[Lap] = []

    def end(self, name: str, worker: str = "") -> None:
        """End a stretch now. One of the same name continues; past the bound, all that follows is in the last one."""
        laps, lap = self.laps, Lap(name, time.perf_counter(), worker)
        if laps and (len(laps) == _MAX_LAPS or (laps[-1].name == name and laps[-1].worker == worker)):
            laps[-1] = laps[-1]._replace(ended_at=lap.ended_at)
        else:
            laps.append(lap)


class Part(Protocol):
    """One prompt of an HTTP request."""

    def written(self) -> None:
        """The first piece of the HTTP answer was handed to the connection."""

    def left(self) -> None:
        """The HTTP request has ended, and nothing more is done for it."""


class Timeline:
    """One HTTP request: its beginning, the stretches that its prompts share, and when its first text was written."""

    __slots__ = ("laps", "parts", "started", "started_unix", "wants_explanation", "written_at")

    def __init__(self, started: float | None = None, *, wants_explanation: bool = False) -> None:
        """`started`: when the request's head was complete, by `time.perf_counter`; None: now."""
        now = time.perf_counter()
        self.started = now if started is None else started
        self.started_unix = time.time() - (now - self.started)
        self.laps = Laps()
        self.written_at: float | None = None
        """When the first text had been handed to the connection; None: not yet, or the answer is no stream."""
        self.parts: list[Part] = []
        self.wants_explanation = wants_explanation

    def end(self, name: str) -> None:
        """End a stretch now."""
        self.laps.end(name)

    def text_begun(self) -> None:
        """A text process has taken the body; it waited until now."""
        self.laps.end("text_wait")

    def written(self) -> None:
        """The first text was handed to the connection."""
        if self.written_at is None:
            self.written_at = time.perf_counter()
            for part in self.parts:
                part.written()

    def left(self) -> None:
        """The HTTP request has ended: end the parts that nobody else ends, and let go of all of them.

        They refer to this timeline: as a cycle they would stay until a garbage collection.
        """
        parts, self.parts = self.parts, []
        for part in parts:
            part.left()
