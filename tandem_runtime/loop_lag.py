"""Measures how long an event loop does not run, and names the code that holds it up.

While a loop is stuck no token moves and no heartbeat is answered. A callback of the loop notes the time every 20 ms. A
thread compares: once the loop is late by more than the limit, the thread samples the stack of the loop's thread. When
the loop runs again, one line has the seconds, the task and the frames that were sampled most often.

A call into C that keeps the interpreter lock also stops this thread. The interpreter switches threads right after such
a call, so that the sample still shows the frame that made the call. If the lock was held by another thread, the loop
itself samples the other threads as soon as it runs.

Frames have module, line and function: no arguments, no local variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from tandem_runtime import metrics
from tandem_runtime.log import get_logger
from tandem_runtime.loop_turns import TurnLoop

log = get_logger(__name__)

STALL_SECONDS = 0.05
"""The loop may be late by this much before it counts as stalled."""

_TICK_SECONDS = 0.02
_LONG_SECONDS = 5.0
"""A stall that is longer is logged while it lasts, too: it may never end."""
_MAX_SAMPLES = 64
_MAX_FRAMES = 4
_MAX_LINES = 20
"""Lines at once; one more per second. Stalls beyond that are counted in the next line."""
_LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

_PACKAGES = frozenset(
    {
        "control_plane",
        "decode_svc",
        "encode_svc",
        "kv_transfer_svc",
        "prefill_svc",
        "tandem_client",
        "tandem_engine",
        "tandem_machine",
        "tandem_runtime",
        "tandem_worker",
    }
)
_WAITING = frozenset({"select", "wait", "_wait_for_tstate_lock", "_worker", "get", "acquire", "poll", "accept", "recv"})
"""Innermost functions of threads that wait."""


@dataclass(frozen=True)
class Stall:
    """A time in which a loop did not run."""

    seconds: float
    cpu_seconds: float
    """What the loop computed in its longest turn meanwhile; the rest of `seconds` it waited for a lock or a processor.

    On a loop other than `TurnLoop` this is what its thread computed since the tick before, at most.
    """
    task: str
    """The task that ran: for an HTTP request method and route, for a gRPC call its method; "" if none did."""
    thread: str
    """The thread of the frames: the loop's own, or another one that held the interpreter lock."""
    frames: tuple[str, ...]
    """The innermost first; empty if nothing was seen, as when the machine had no processor for this process."""


class LoopWatchdog:
    """Watches the event loop that `start` is called on. `stop` ends the thread."""

    def __init__(
        self,
        stall_seconds: float = STALL_SECONDS,
        *,
        on_stall: Callable[[Stall], None] | None = None,
        packages: frozenset[str] = _PACKAGES,
    ) -> None:
        """`on_stall` is called in the watchdog's thread; the default logs. `packages`: whose frames are named."""
        self._stall_seconds = stall_seconds
        self._on_stall = on_stall or _Lines().stalled
        self._packages = packages
        self._lags = metrics.meter().create_histogram(
            "tandem.loop.lag",
            unit="s",
            description="How late the event loop ran a callback that was due.",
            explicit_bucket_boundaries_advisory=_LAG_BUCKETS,
        )
        self._ended = threading.Event()
        self._samples: list[_Sample] = []
        self._sampled_due = 0.0
        self._is_long_logged = False
        self._late: deque[tuple[float, float, float, tuple[_Sample, ...]]] = deque()
        self._cpu_seconds = 0.0
        """Of the loop's thread, at the last tick."""
        self.num_samples = 0
        """Samples so far, of all stalls."""

    def start(self) -> None:
        """Begin to watch the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._turns = self._loop.turns if isinstance(self._loop, TurnLoop) else None
        self._loop_thread_id = threading.get_ident()
        self._due = time.monotonic()
        self._timer = self._loop.call_soon(self._tick)
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after it has reported all stalls so far. Call on the event loop."""
        self._timer.cancel()
        self._tick()
        self._timer.cancel()
        self._ended.set()
        self._thread.join()

    # ------------------------------------------------------------------------------------------ on the event loop

    def _tick(self) -> None:
        now, cpu_seconds = time.monotonic(), time.thread_time()
        lag = max(0.0, now - self._due)
        self._lags.record(lag)
        computed = self._turns.take_longest() if self._turns else min(lag, cpu_seconds - self._cpu_seconds)
        if lag > self._stall_seconds:
            self._late.append((self._due, lag, computed, tuple(self._other_threads())))
        self._cpu_seconds = cpu_seconds
        self._due = now + _TICK_SECONDS
        self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)

    # --------------------------------------------------------------------------------------- in the thread of its own

    def _watch(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            self._look()
        self._report_ended()

    def _look(self) -> None:
        due = self._due
        self._report_ended()
        lag = time.monotonic() - due
        if lag <= self._stall_seconds:
            return
        if due != self._sampled_due:
            self._samples, self._sampled_due, self._is_long_logged = [], due, False
        sample = self._sample()
        if due == self._due and len(self._samples) < _MAX_SAMPLES:  # else the loop ran meanwhile
            self._samples.append(sample)
            self.num_samples += 1
        if lag > _LONG_SECONDS and not self._is_long_logged:
            self._is_long_logged = True
            log.warning("loop_stuck", seconds=round(lag, 3), task=sample.task, frames=list(sample.frames))

    def _report_ended(self) -> None:
        while self._late:
            due, lag, computed, others = self._late.popleft()
            samples = [sample for sample in self._samples if sample.frames] if due == self._sampled_due else []
            [(sample, _)] = Counter(samples or others or [_NOTHING_SEEN]).most_common(1)
            self._on_stall(Stall(lag, computed, sample.task, sample.thread, sample.frames))

    def _sample(self) -> _Sample:
        """Return what the loop's thread does; without frames while it only waits for the interpreter lock."""
        frame = sys._current_frames().get(self._loop_thread_id)
        if frame is None or _is_waiting(frame):
            return _NOTHING_SEEN
        return _Sample(_name_of(asyncio.current_task(self._loop)), "event loop", self._frames(frame))

    def _other_threads(self) -> Iterator[_Sample]:
        """Yield what other threads do that run code: one of them may have held the interpreter lock."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for thread_id, frame in sys._current_frames().items():
            if thread_id in (self._loop_thread_id, self._thread.ident) or _is_waiting(frame):
                continue
            if frames := self._frames(frame):
                yield _Sample("", names.get(thread_id, "a thread of a library"), frames)

    def _frames(self, innermost: FrameType) -> tuple[str, ...]:
        """Return the innermost frames of our own packages, after the innermost frame of all."""
        found = [_place(innermost)]
        frame = innermost.f_back
        while frame is not None and len(found) < _MAX_FRAMES:
            if _package_of(frame) in self._packages:
                found.append(_place(frame))
            frame = frame.f_back
        return tuple(found)


@contextlib.contextmanager
def watched(stall_seconds: float) -> Iterator[None]:
    """Watch the running event loop inside the block; not at all with 0."""
    if not stall_seconds:
        yield
        return
    watchdog = LoopWatchdog(stall_seconds)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


def name_task(name: str) -> None:
    """Name the current task after what it does, such as `POST /v1/chat/completions`, for the line about a stall."""
    task = asyncio.current_task()
    if task is not None:
        task.set_name(name)


class _Lines:
    """Logs stalls, and bounds how many lines that makes."""

    def __init__(self) -> None:
        self._allowance = float(_MAX_LINES)
        self._counted_at = time.monotonic()
        self._num_unlogged = 0

    def stalled(self, stall: Stall) -> None:
        now = time.monotonic()
        self._allowance = min(float(_MAX_LINES), self._allowance + now - self._counted_at)
        self._counted_at = now
        if self._allowance < 1:
            self._num_unlogged += 1
            return
        self._allowance -= 1
        log.warning(
            "loop_stalled",
            seconds=round(stall.seconds, 3),
            cpu_seconds=round(stall.cpu_seconds, 3),
            task=stall.task,
            thread=stall.thread,
            frames=list(stall.frames),
            num_unlogged=self._num_unlogged,
        )
        self._num_unlogged = 0


@dataclass(frozen=True)
class _Sample:
    task: str
    thread: str
    frames: tuple[str, ...]


_NOTHING_SEEN = _Sample("", "", ())


def _is_waiting(frame: FrameType) -> bool:
    return frame.f_code.co_name in _WAITING and _package_of(frame) not in _PACKAGES


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _place(frame: FrameType) -> str:
    module = frame.f_globals.get("__name__", "?")
    return f"{module}:{frame.f_lineno} {frame.f_code.co_qualname}"


def _name_of(task: asyncio.Task[object] | None) -> str:
    """Return a task's name, or the name of its coroutine function if nobody named the task."""
    if task is None:
        return ""
    name = task.get_name()
    return name if not name.startswith("Task-") else getattr(task.get_coro(), "__qualname__", name)
