"""Limits waits by a request's deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from tandem_runtime.errors import DeadlineExceeded


@asynccontextmanager
async def until(deadline: float, timeout_seconds: float) -> AsyncIterator[None]:
    """Raise DeadlineExceeded if `deadline` (`time.monotonic`) passes inside the block."""
    time_left = Deadline(deadline, timeout_seconds)
    try:
        async with time_left:
            yield
    finally:
        time_left.close()


class Deadline:
    """`async with deadline:` cancels the awaits inside when the deadline passes, and raises DeadlineExceeded.

    Unlike asyncio.timeout, it can be entered for every wait of a stream, and one timer serves all waits. One task may
    use it at a time. Call `close` after the last wait.
    """

    def __init__(self, at: float, timeout_seconds: float) -> None:
        """`at` by `time.monotonic`. `timeout_seconds` is the whole time, for `shorten` and the error message."""
        self.at = at
        self.timeout_seconds = timeout_seconds
        self._has_passed = False
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_at(at, self._pass)

    def shorten(self, timeout_seconds: float) -> None:
        """Limit the whole time to `timeout_seconds`, if that is less."""
        sooner = self.timeout_seconds - timeout_seconds
        if sooner > 0 and not self._has_passed:
            self._timer.cancel()
            self.at, self.timeout_seconds = self.at - sooner, timeout_seconds
            self._timer = self._loop.call_at(self.at, self._pass)

    def close(self) -> None:
        self._timer.cancel()

    async def __aenter__(self) -> None:
        if self._has_passed or self._loop.time() >= self.at:  # a timer may fire early, by the clock's resolution
            raise self._error()
        self._task = asyncio.current_task()
        assert self._task is not None, "a deadline is entered inside a task"
        self._num_cancels = self._task.cancelling()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self._has_passed or task is None:
            return
        # Undo our own cancel; a cancel by others at the same time stays.
        if task.uncancel() <= self._num_cancels and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._error() from error

    def _pass(self) -> None:
        self._has_passed = True
        if self._task is not None:
            self._task.cancel()

    def _error(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the request took longer than its {self.timeout_seconds:g} seconds; request fewer tokens or more time"
        )
