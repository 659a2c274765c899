"""An event loop on virtual time, for simulated processes that can be stopped and killed.

One loop runs all processes of the simulation. A callback belongs to the process in whose context it was scheduled.
Callbacks of a stopped process wait until it is woken; those of a killed process never run. Tasks of killed processes
are kept, so that the garbage collector does not run their `finally` clauses: kill -9 runs none.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

_PROCESS: ContextVar[Process | None] = ContextVar("simulated process", default=None)


@dataclass(eq=False)
class Process:
    """One life of one simulated process."""

    name: str
    host: int
    loop: VirtualLoop
    is_dead: bool = False
    is_stopped: bool = False
    woken_at: float = 0.0
    on_end: list[Callable[[], None]] = field(default_factory=list)
    """Called when the process is killed: the kernel closes its sockets."""
    context: Context = field(init=False)
    backlog: deque[asyncio.Handle] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.context = copy_context()
        self.context.run(_PROCESS.set, self)

    @property
    def is_running(self) -> bool:
        return not (self.is_dead or self.is_stopped)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Schedule `function` in this process, in order with its other callbacks."""
        self.loop.call_soon(function, *args, context=self.context)

    def kill(self) -> None:
        self.is_dead = True
        self.backlog.clear()
        callbacks, self.on_end = self.on_end, []
        for callback in callbacks:
            callback()

    def stop(self) -> None:
        self.is_stopped = True

    def wake(self) -> None:
        self.is_stopped, self.woken_at = False, self.loop.time()
        self.loop.take_back(self.backlog)
        self.backlog = deque()


def current_process() -> Process | None:
    return _PROCESS.get()


class VirtualLoop(asyncio.AbstractEventLoop):
    """Implements what tasks, futures, timers and `to_thread` need; has no sockets."""

    def __init__(self) -> None:
        self.num_events = 0
        self.broken: list[str] = []
        """Exceptions that no task could receive."""
        self._now = 0.0
        self._number = 0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._num_kept = 1024
        self._is_over = False

    # -------------------------------------------------------------------------------------------- running it

    def run_until(self, when: float, after_each_moment: Callable[[], None]) -> None:
        """Run everything due until `when`; call `after_each_moment` when all callbacks of one moment are done."""
        asyncio._set_running_loop(self)
        try:
            while self._ready or (self._timers and self._timers[0][0] <= when):
                if not self._ready:
                    self._advance()
                while self._ready:
                    self._run(self._ready.popleft())
                after_each_moment()
            self._now = max(self._now, when)
        finally:
            asyncio._set_running_loop(None)

    def end(self) -> None:
        """Cancel every task, of killed processes too, so that nothing of this run is left."""
        asyncio._set_running_loop(self)
        try:
            self._is_over = True
            for _ in range(50):
                unfinished = [task for task in self._tasks if not task.done()]
                if not unfinished:
                    break
                for task in unfinished:
                    task.cancel()
                while self._ready:
                    handle = self._ready.popleft()
                    if not handle.cancelled():
                        handle._run()
        finally:
            for task in self._tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            self._timers.clear()
            asyncio._set_running_loop(None)

    def take_back(self, handles: deque[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def _advance(self) -> None:
        """Advance to the next timer and make all due timers ready."""
        when = self._timers[0][0]
        self._now = max(self._now, when)
        while self._timers and self._timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(self._timers)[2])

    def _run(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        process: Process | None = handle._context.get(_PROCESS)  # type: ignore[attr-defined]
        if process is not None and not process.is_running:
            if not process.is_dead:
                process.backlog.append(handle)
            return
        self.num_events += 1
        handle._run()

    # ---------------------------------------------------------------------------------- asyncio's interface

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._number += 1
        if not self._is_over:
            heapq.heappush(self._timers, (when, self._number, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: cancelled timers are skipped when they are due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coroutine: Any, *, name: str | None = None, context: Context | None = None) -> Any:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=self, name=name, context=context)
        self._tasks.append(task)
        if len(self._tasks) > self._num_kept:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._num_kept = 2 * len(self._tasks) + 1024
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a thread's work 2 ms later, in one piece."""
        result = self.create_future()

        def work() -> None:
            if result.cancelled():
                return
            try:
                result.set_result(function(*args))
            except Exception as error:  # noqa: BLE001 - goes to the caller
                result.set_exception(error)

        self.call_later(0.002, work)
        return result

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_over:
            self.broken.append(f"{context.get('message')}: {context.get('exception')!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    async def shutdown_asyncgens(self) -> None: ...
