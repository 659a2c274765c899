"""Keeps the requests that wait for a worker: in a room per model, so that a full or lost model delays no other.

A room is first come, first served. It is bounded, and so is what one account may have in it. A room is made for the
first request that waits for its model, and dropped with the last.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from control_plane.generation import TokenRequest
from tandem_runtime.errors import Overloaded, TandemError

_TICK_SECONDS = 0.25
"""How often each room's first request is retried though none of ours has ended: another gateway's may have."""


@dataclass(eq=False)
class _Room:
    """The requests that wait for one model, in order."""

    turns: deque[asyncio.Future[None]] = field(default_factory=deque)
    num_by_account: Counter[str] = field(default_factory=Counter)

    def release_next(self) -> None:
        if self.turns and not self.turns[0].done():
            self.turns[0].set_result(None)


_NOBODY = _Room()


class AdmissionQueue:
    """A room per model. Releases a room's first request whenever another request of the model ends."""

    def __init__(self, max_waiting: int, queue_seconds: float, max_per_account: int = 0) -> None:
        """`max_waiting` and `max_per_account` are requests in one room; 0: half of a room, but at least one request."""
        self._max_waiting = max_waiting
        self._queue_seconds = queue_seconds
        self._max_per_account = max_per_account or max(1, max_waiting // 2)
        self._has_accounts: Callable[[], bool] = lambda: True
        self._rooms: dict[str, _Room] = {}
        self._closed: TandemError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return how many requests wait in all rooms."""
        return sum(len(room.turns) for room in self._rooms.values())

    def num_waiting(self, model_id: str) -> int:
        room = self._rooms.get(model_id)
        return len(room.turns) if room else 0

    def num_by_model(self) -> Mapping[str, int]:
        """Return how many requests wait for each model for which any does."""
        return {model_id: len(room.turns) for model_id, room in self._rooms.items()}

    def deadline(self, request: TokenRequest) -> float:
        """Return until when (`time.monotonic`) a request that begins to wait now may wait."""
        return min(request.deadline, time.monotonic() + self._queue_seconds)

    async def wait(self, model_id: str, account: str, refusal: TandemError, seconds: float, *, in_front: bool) -> None:
        """Return when it is this request's turn; `in_front` for a request whose attempt has just failed.

        Raises `refusal` after `seconds`, Overloaded at once if the room is full, and the error of `close`.
        """
        if self._closed is not None:
            raise self._closed
        if not in_front:
            self._raise_if_full(model_id, account, refusal.retry_after_seconds or 1.0)
        room = self._rooms.setdefault(model_id, _Room())
        turn = asyncio.get_running_loop().create_future()
        (room.turns.appendleft if in_front else room.turns.append)(turn)
        room.num_by_account[account] += 1
        self._schedule_tick()
        try:
            await asyncio.wait_for(turn, max(0.0, seconds))
        except TimeoutError:
            raise refusal from None
        finally:
            self._leave(model_id, room, account, turn)

    def release_next(self, model_id: str) -> None:
        """Let the model's first request try. Call when a request has ended, or was started and more may fit."""
        if (room := self._rooms.get(model_id)) is not None:
            room.release_next()

    def bound_accounts_while(self, has_accounts: Callable[[], bool]) -> None:
        """Bound what one account has in a room only while this is true: else any caller takes any account's name."""
        self._has_accounts = has_accounts

    def close(self, error: TandemError) -> None:
        """Refuse the requests that wait, and all later ones."""
        self._closed = error
        for room in self._rooms.values():
            for turn in room.turns:
                if not turn.done():
                    turn.set_exception(error)

    def _raise_if_full(self, model_id: str, account: str, retry_after_seconds: float) -> None:
        room = self._rooms.get(model_id, _NOBODY)
        num_waiting, num_own = len(room.turns), room.num_by_account[account]
        if num_waiting >= self._max_waiting:
            raise Overloaded(
                f"{num_waiting} requests wait for {model_id} already, the limit is {self._max_waiting}; try again "
                "later, add workers of the model or raise --max-waiting",
                retry_after_seconds=retry_after_seconds,
            )
        if num_own >= self._max_per_account and self._has_accounts():
            raise Overloaded(
                f"{num_own} requests of your account wait for {model_id} already, the limit for one account is "
                f"{self._max_per_account}; try again later, or have the operator raise --max-waiting-per-account",
                retry_after_seconds=retry_after_seconds,
            )

    def _leave(self, model_id: str, room: _Room, account: str, turn: asyncio.Future[None]) -> None:
        room.turns.remove(turn)
        room.num_by_account[account] -= 1
        if not room.num_by_account[account]:
            del room.num_by_account[account]
        if not room.turns:
            del self._rooms[model_id]

    def _schedule_tick(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for room in self._rooms.values():
            room.release_next()
        if self._rooms:
            self._schedule_tick()
