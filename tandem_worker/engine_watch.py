"""Notices an engine process that neither answers nor computes: stopped, or waiting for a disk or for swap.

    answering --nothing heard for a second--> asked (Ping) --no answer and no processor time for the limit--> silent
        ^------------------------------ any event, of which Pong is one ------------------------------------------'

A long step is no silence while the process uses the processor; only `_LONGEST_STEP_SECONDS` bounds that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import psutil

from tandem_engine import messages
from tandem_runtime.log import get_logger

log = get_logger(__name__)

TICK_SECONDS = 0.25
_ASK_SECONDS = 1.0
"""Silence of an engine with requests after which it is asked; an idle one is asked each `_ASK_IDLE_SECONDS`."""
_ASK_IDLE_SECONDS = 5.0
_LATE_SECONDS = 0.5
"""A tick that is later than this means that this process slept, and the engine maybe too."""
_LONGEST_STEP_SECONDS = 300.0
_LEAST_PROCESSOR_SECONDS = 0.02
"""Processor time since the last look that counts as computing."""


class Watched(Protocol):
    """What is watched: an EngineLink."""

    @property
    def pid(self) -> int: ...

    def send(self, command: messages.Command, *fds: int) -> None: ...


class EngineWatch:
    """Watches one engine; every method runs on the event loop, with `now` in monotonic seconds."""

    def __init__(
        self,
        engine: Watched,
        limit_seconds: float,
        *,
        is_busy: Callable[[], bool],
        on_silent: Callable[[float], None],
        on_answer: Callable[[float], None],
        processor_seconds: Callable[[int], float] | None = None,
    ) -> None:
        """`on_silent` and `on_answer` get the seconds since the last event."""
        self.is_silent = False
        self._engine = engine
        self._limit_seconds = limit_seconds
        self._is_busy = is_busy
        self._on_silent = on_silent
        self._on_answer = on_answer
        self._processor_seconds = processor_seconds or _processor_seconds
        self._heard_at = 0.0
        self._ticked_at = 0.0
        self._asked_at: float | None = None
        self._computed_at = 0.0
        self._processor_seen = 0.0
        self._longest_step_seconds = 0.0

    async def run(self) -> None:
        """Tick until cancelled."""
        self._heard_at = self._ticked_at = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.tick(time.monotonic())

    def heard(self, now: float) -> None:
        """Note an event of the engine."""
        silence = now - self._heard_at
        self._heard_at = now
        if self._asked_at is not None:
            self._asked_at = None
            self._longest_step_seconds = max(self._longest_step_seconds, silence)
        if self.is_silent:
            self.is_silent = False
            self._on_answer(silence)

    def tick(self, now: float) -> None:
        """Ask an engine that has been quiet, and report one that has not answered."""
        late = now - self._ticked_at - TICK_SECONDS
        self._ticked_at = now
        if late > _LATE_SECONDS:
            self._forgive(late)
        silence = now - self._heard_at
        if self._asked_at is None:
            if silence >= (_ASK_SECONDS if self._is_busy() else _ASK_IDLE_SECONDS):
                self._processor_seen = self._processor_seconds(self._engine.pid)  # without descriptors this fails
                self._asked_at = self._computed_at = now
                self._engine.send(messages.Ping())
            return
        self._look_whether_it_computes(now)
        longest = max(_LONGEST_STEP_SECONDS, 10 * self._longest_step_seconds)
        is_stuck = now - self._computed_at >= self._limit_seconds or now - self._asked_at >= longest
        if is_stuck and not self.is_silent:
            self.is_silent = True
            self._on_silent(silence)

    def _forgive(self, late: float) -> None:
        """Add the seconds that this process slept to every time since which something is awaited."""
        self._heard_at += late
        self._computed_at += late
        if self._asked_at is not None:
            self._asked_at += late

    def _look_whether_it_computes(self, now: float) -> None:
        used = self._processor_seconds(self._engine.pid)
        if used - self._processor_seen >= _LEAST_PROCESSOR_SECONDS:
            self._processor_seen = used
            self._computed_at = now


def _processor_seconds(pid: int) -> float:
    """Return the processor time of a process, 0 for one that has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
