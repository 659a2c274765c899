"""Shares slots among accounts: in turn, and to one account at most half of them, for a bounded number of bytes."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tandem_runtime.errors import Overloaded


@dataclass(eq=False)
class _Waiter:
    turn: asyncio.Future[None]
    num_bytes: int


class Lane:
    """Slots for bodies of one size class. Accounts take turns.

    An account holds half of the slots at most, and its second slot only if its bodies have `max_account_bytes` at most.
    """

    def __init__(
        self, name: str, num_slots: int, max_waiting: int, max_waiting_bytes: int, max_account_bytes: int
    ) -> None:
        self.name = name
        self.num_slots = num_slots
        self._max_per_account = (num_slots + 1) // 2
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._max_account_bytes = max_account_bytes
        self._running: Counter[str] = Counter()
        self._running_bytes: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        """By account; the first account that may run is next."""
        self.num_waiting = 0
        self.num_waiting_bytes = 0

    @property
    def num_running(self) -> int:
        return self._running.total()

    @asynccontextmanager
    async def slot(self, account: str, num_bytes: int) -> AsyncIterator[None]:
        """Hold a slot inside. Raise Overloaded if too much waits already."""
        await self.take(account, num_bytes)
        try:
            yield
        finally:
            self.give_back(account, num_bytes)

    async def take(self, account: str, num_bytes: int) -> None:
        """Wait for a slot; `give_back` ends it. Raise Overloaded."""
        if account not in self._waiting and self._may_run(account, num_bytes):
            self._run(account, num_bytes)
            return
        if self.num_waiting >= self._max_waiting or self.num_waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise Overloaded(
                f"{self.num_waiting:,} requests of {self.num_waiting_bytes:,} bytes wait to be tokenized, "
                f"{self._max_waiting:,} requests of {self._max_waiting_bytes:,} bytes may; try again later",
                retry_after_seconds=2.0,
            )
        waiter = _Waiter(asyncio.get_running_loop().create_future(), num_bytes)
        self._waiting.setdefault(account, deque()).append(waiter)
        self._count(waiter, 1)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self.give_back(account, num_bytes)
            else:
                self._forget(account, waiter)
            raise

    def give_back(self, account: str, num_bytes: int) -> None:
        """End what `take` began, with the same arguments."""
        self._running[account] -= 1
        self._running_bytes[account] -= num_bytes
        if not self._running[account]:
            del self._running[account], self._running_bytes[account]
        self._wake()

    def _run(self, account: str, num_bytes: int) -> None:
        self._running[account] += 1
        self._running_bytes[account] += num_bytes

    def _may_run(self, account: str, num_bytes: int) -> bool:
        num_running = self._running.get(account, 0)
        if self.num_running >= self.num_slots or num_running >= self._max_per_account:
            return False
        return not num_running or self._running_bytes[account] + num_bytes <= self._max_account_bytes

    def _first_may_run(self, account: str) -> bool:
        return self._may_run(account, self._waiting[account][0].num_bytes)

    def _wake(self) -> None:
        """Give free slots to waiting accounts, in turn."""
        while account := next(filter(self._first_may_run, self._waiting), None):
            waiter = self._waiting[account].popleft()
            self._waiting.move_to_end(account)
            self._drop_if_empty(account)
            self._count(waiter, -1)
            self._run(account, waiter.num_bytes)
            waiter.turn.set_result(None)

    def _forget(self, account: str, waiter: _Waiter) -> None:
        self._waiting[account].remove(waiter)
        self._drop_if_empty(account)
        self._count(waiter, -1)
        self._wake()  # a shorter one behind it may run

    def _drop_if_empty(self, account: str) -> None:
        if not self._waiting[account]:
            del self._waiting[account]

    def _count(self, waiter: _Waiter, sign: int) -> None:
        self.num_waiting += sign
        self.num_waiting_bytes += sign * waiter.num_bytes
