"""Keeps background tasks alive until they end, ends them together, restarts loops that fail, and spreads work.

An event loop holds only weak references to its tasks (https://docs.python.org/3/library/asyncio-task.html#asyncio.create_task),
so each owner of background tasks has a `TaskSet`. A task that loops for as long as its process runs is `supervised`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from tandem_runtime import metrics
from tandem_runtime.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 30.0
HEALTHY_SECONDS = 60.0
"""A loop that ran this long before it failed is restarted as after a first failure."""


async def supervised(
    name: str,
    run: Callable[[], Awaitable[None]],
    *,
    longest_pause_seconds: float = LONGEST_PAUSE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Run `run`; after an exception, log it, count it and run `run` again, until it returns or this is cancelled.

    The pauses are exponential with jitter, from 0.1 s on, and at most `longest_pause_seconds`.
    """
    failures = metrics.meter().create_counter(
        "tandem.background.failures", description="Exceptions that ended a background loop, which was restarted."
    )
    num_in_a_row = 0
    while True:
        started = clock()
        try:
            return await run()
        except Exception as error:
            num_in_a_row = 1 if clock() - started >= HEALTHY_SECONDS else num_in_a_row + 1
            seconds = pause_seconds(num_in_a_row, longest_pause_seconds)
            failures.add(1, {"tandem.task": name})
            log.error(
                "background_loop_failed",
                task=name,
                kind=type(error).__name__,
                num_in_a_row=num_in_a_row,
                restart_seconds=round(seconds, 3),
                exc_info=error,
            )
        await pause(seconds)


def pause_seconds(num_in_a_row: int, longest_seconds: float = LONGEST_PAUSE_SECONDS) -> float:
    """Return the pause after failure `num_in_a_row`: half of its exponential value to all of it, at random."""
    longest = min(longest_seconds, FIRST_PAUSE_SECONDS * 2.0 ** min(num_in_a_row - 1, 30))
    return longest * random.uniform(0.5, 1.0)


class Turns:
    """Spreads work over turns of the event loop: one task goes on in each turn, in order of arrival.

    A loop runs everything that is due before it looks at its sockets again. So a millisecond of work in each of 500
    tasks that begin together would stop every stream for half a second.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Return in a later turn, in which no other task returns from here."""
        async with self._lock:
            await asyncio.sleep(0)


class FewPerTurn:
    """Lets some tasks go on at once in each turn of the event loop, and each of the others in a turn of its own."""

    def __init__(self, number: int) -> None:
        self._number = self._left = number
        self._is_counting = False
        self._turns = Turns()

    async def next(self) -> None:
        """Return at once, or in a later turn if so many tasks have gone on in this one."""
        if not self._left:
            await self._turns.next()
            return
        self._left -= 1
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._turn_ended)

    def _turn_ended(self) -> None:
        self._left, self._is_counting = self._number, False


class TaskSet:
    """The background tasks of one owner. Logs the exception of a task, since nobody may await the task."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a task and keep it until it ends. Call inside a running event loop."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        """Iterate over a copy: tasks may end meanwhile."""
        return iter(tuple(self._tasks))

    async def join(self) -> None:
        """Wait until the tasks of this moment have ended; their exceptions are not raised here."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cancel(self) -> None:
        """Cancel the tasks of this moment and wait until they have ended."""
        for task in self:
            task.cancel()
        await self.join()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background_task_failed", task=task.get_name(), exc_info=error)
