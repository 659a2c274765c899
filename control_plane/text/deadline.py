"""How does work end when a request's time is up?"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from tandem_runtime.errors import DeadlineExceeded


class Deadline:
    """`async with deadline:` cancels what is awaited inside when the time has come, and raises DeadlineExceeded.

    Unlike asyncio.timeout it is entered again and again, once for every wait of a stream, and has one timer for all of
    them. For one task at a time. `close` when nothing more will be waited for.
    """

    def __init__(self, at: float, timeout_seconds: float) -> None:
        """`at`: Unix seconds; `timeout_seconds` is only told."""
        self._timeout_seconds = timeout_seconds
        self._has_passed = False
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time() + at - time.time()
        self._timer = self._loop.call_at(self._at, self._pass)

    def close(self) -> None:
        self._timer.cancel()

    async def __aenter__(self) -> None:
        if self._has_passed or self._loop.time() >= self._at:  # a timer may be early by the clock's resolution
            raise self._error()
        self._task = asyncio.current_task()
        assert self._task is not None, "inside a task"
        self._num_cancels = self._task.cancelling()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self._has_passed or task is None:
            return
        # Our own cancel is taken back; somebody else's, at the same time, goes on.
        if task.uncancel() <= self._num_cancels and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._error() from error

    def _pass(self) -> None:
        self._has_passed = True
        if self._task is not None:
            self._task.cancel()

    def _error(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the request took longer than its {self._timeout_seconds:g} seconds; ask for fewer tokens or more time"
        )
