"""Queues a request's events for its reader, and wakes readers in rounds.

A round wakes readers at once while waking is cheap. With hundreds of streams it is not: each stream writes to its
socket, and the tokens of the next steps wait meanwhile. After a round of a millisecond or more, the gateway reads from
its workers for as long as the round took (20 ms at most) before the next round. A stream then writes all its new tokens
in one piece. The higher the load, the less a token costs; a token waits no longer than the last round took.
"""

from __future__ import annotations

import asyncio
from collections import deque

from control_plane.generation import TokenDelta
from tandem_runtime.errors import TandemError

_SHORTEST_PAUSE_SECONDS = 0.001
"""A shorter pause gathers too few tokens to be worth a timer, whose resolution is 1 ms."""
_LONGEST_PAUSE_SECONDS = 0.02


class WakeupScheduler:
    """Wakes the readers of all streams of one event loop."""

    def __init__(self) -> None:
        self._due: list[asyncio.Future[None]] = []
        self._is_round_scheduled = False
        self._round_started = 0.0
        self._rest_until = 0.0

    def wake(self, waiting: asyncio.Future[None]) -> None:
        """Set the result of `waiting` in the next round, unless it is done by then."""
        self._due.append(waiting)
        if not self._is_round_scheduled:
            self._schedule_round()

    def _schedule_round(self) -> None:
        self._is_round_scheduled = True
        loop = asyncio.get_running_loop()
        if self._rest_until > loop.time():
            loop.call_at(self._rest_until, self._run_round)
        else:
            loop.call_soon(self._run_round)

    def _run_round(self) -> None:
        loop = asyncio.get_running_loop()
        self._round_started = loop.time()
        due, self._due = self._due, []
        for waiting in due:
            if not waiting.done():
                waiting.set_result(None)
        loop.call_soon(self._end_round)  # runs after every task that this round woke

    def _end_round(self) -> None:
        now = asyncio.get_running_loop().time()
        took = now - self._round_started
        self._rest_until = now + min(took, _LONGEST_PAUSE_SECONDS) if took >= _SHORTEST_PAUSE_SECONDS else now
        self._is_round_scheduled = False
        if self._due:
            self._schedule_round()


class EventQueue(deque[TokenDelta | TandemError]):
    """The events of one request that its reader has not taken yet. One reader; it pops from the left."""

    def __init__(self, wakeups: WakeupScheduler) -> None:
        super().__init__()
        self._wakeups = wakeups
        self._waiting: asyncio.Future[None] | None = None

    def put(self, event: TokenDelta | TandemError) -> None:
        """Append an event and wake the reader. A plain `append` does not wake."""
        self.append(event)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._wakeups.wake(waiting)

    async def wait(self) -> None:
        """Return after the next `put`, in a round of wake-ups. Call while the queue is empty."""
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting
