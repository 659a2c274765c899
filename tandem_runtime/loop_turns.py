"""An event loop that knows how much processor time each of its turns took.

A turn is what the loop computes between two waits: the callbacks that were ready. A loop that is late may have
computed, or it may have waited for a processor; only the first is the code's fault.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class TurnSelector(selectors.DefaultSelector):
    """The platform's selector, which the loop calls between two turns."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.thread_time()
        self._longest_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events; what lies before is one turn, what follows the next."""
        self._longest_seconds = max(self._longest_seconds, time.thread_time() - self._began)
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        self._began = time.thread_time()
        return ready

    def take_longest(self) -> float:
        """Return the most processor seconds of a turn since the last call; call in the loop's thread."""
        longest, self._longest_seconds = self._longest_seconds, 0.0
        return longest


class TurnLoop(asyncio.SelectorEventLoop):
    """asyncio's event loop with a `TurnSelector`."""

    def __init__(self) -> None:
        self.turns = TurnSelector()
        super().__init__(self.turns)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, on a `TurnLoop`."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(main)


def _new_loop() -> asyncio.AbstractEventLoop:
    loop = TurnLoop()
    asyncio.set_event_loop(loop)  # for libraries that look it up
    return loop
