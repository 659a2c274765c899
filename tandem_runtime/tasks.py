"""Keeps background tasks alive until they end, and ends them together.

An event loop holds only weak references to its tasks (https://docs.python.org/3/library/asyncio-task.html#asyncio.create_task),
so each owner of background tasks has a `TaskSet`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from tandem_runtime.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")


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
