"""Bounds what the tasks of an event loop do to blocks in one of its turns, all of them together.

A task that pauses after each run of blocks leaves the loop to the others. But dozens of calls may be ready at once: in
one turn each would do its run.
"""

from __future__ import annotations

import asyncio
from collections import deque


class TurnBudget:
    """Units of work for each turn; whoever finds them spent waits for a later turn, first come first served."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._num_spent = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def take(self, units: int) -> None:
        """Return in a turn that has units left, and spend `units`: more than are left, if need be."""
        loop = asyncio.get_running_loop()
        if self._num_spent < self._units and not self._waiting:
            if not self._num_spent:
                loop.call_soon(self._renew)
            self._num_spent += units
            return
        turn = loop.create_future()
        self._waiting.append((turn, units))
        await turn

    def _renew(self) -> None:
        """Begin a turn: wake those who wait, as far as its units go."""
        self._num_spent = 0
        while self._waiting and self._num_spent < self._units:
            turn, units = self._waiting.popleft()
            if not turn.done():  # a cancelled task waits no more
                turn.set_result(None)
                self._num_spent += units
        if self._num_spent:
            asyncio.get_running_loop().call_soon(self._renew)
