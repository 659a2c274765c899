"""Counts the turns of the running event loop, for tests of what may happen in one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class LoopTurns:
    """`now` is the number of the loop's present turn."""

    def __init__(self) -> None:
        self.now = 0
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._count)

    def _count(self) -> None:
        self.now += 1
        self._next = self._loop.call_soon(self._count)

    def stop(self) -> None:
        self._next.cancel()


@contextmanager
def counted_turns() -> Iterator[LoopTurns]:
    turns = LoopTurns()
    try:
        yield turns
    finally:
        turns.stop()
