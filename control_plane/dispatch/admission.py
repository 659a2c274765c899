"""Where do requests wait while every worker is full, and in what order are they tried again?"""

from __future__ import annotations

import asyncio
from collections import deque

from tandem_runtime.errors import Overloaded, TandemError

_TICK_SECONDS = 0.25
"""The first is tried again that often even if nobody here has left: another gateway's request may have."""


class WaitingRoom:
    """A bounded queue at the door. One at a time is let out: the first, whenever somebody leaves the house."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._turns: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._turns)

    async def wait(self, refusal: TandemError, seconds: float, *, in_front: bool) -> None:
        """Return when it is this request's turn; `in_front` for one that has just been tried in vain.

        Raises `refusal` after `seconds`, and Overloaded at once if the room is full.
        """
        if len(self._turns) >= self._max_waiting and not in_front:
            raise Overloaded(
                f"{len(self._turns)} requests wait already, the limit is {self._max_waiting}; try again later, add "
                "workers or raise --max-waiting",
                retry_after_seconds=refusal.retry_after_seconds or 1.0,
            )
        turn = asyncio.get_running_loop().create_future()
        (self._turns.appendleft if in_front else self._turns.append)(turn)
        self._tick_later()
        try:
            await asyncio.wait_for(turn, max(0.0, seconds))
        except TimeoutError:
            raise refusal from None
        finally:
            self._turns.remove(turn)

    def next(self) -> None:
        """Let the first try: somebody left, or was let in and there may be room for more."""
        if self._turns and not self._turns[0].done():
            self._turns[0].set_result(None)

    def _tick_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.next()
        if self._turns:
            self._tick_later()
