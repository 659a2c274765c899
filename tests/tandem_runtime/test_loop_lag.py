"""The watchdog names the code that stops an event loop: the task, the function and its line, nothing else."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import structlog.testing
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tandem_runtime import loop_lag, loop_turns, metrics
from tandem_runtime.loop_lag import LoopWatchdog, Stall, name_task
from tandem_runtime.loop_turns import TurnLoop

OURS = frozenset({"tests"})


class Watched:
    """A watchdog over the running loop; `next_stall` waits for what it reports."""

    def __init__(self, stall_seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._stalls: asyncio.Queue[Stall] = asyncio.Queue()
        self.watchdog = LoopWatchdog(stall_seconds, on_stall=self._stalled, packages=OURS)

    def _stalled(self, stall: Stall) -> None:
        self._loop.call_soon_threadsafe(self._stalls.put_nowait, stall)

    async def next_stall(self, task: str) -> Stall:
        """Return the next stall of this task; a busy machine may add others."""
        async with asyncio.timeout(30):
            while (stall := await self._stalls.get()).task != task:
                pass
        return stall


@contextmanager
def watched(stall_seconds: float = 0.05) -> Iterator[Watched]:
    here = Watched(stall_seconds)
    here.watchdog.start()
    try:
        yield here
    finally:
        here.watchdog.stop()


def computes_until_seen(watchdog: LoopWatchdog, prompt: str) -> None:
    """Block the loop, and let other threads run, as Python code does."""
    num_before = watchdog.num_samples
    while watchdog.num_samples == num_before:
        len(prompt)


def keeps_the_lock_until_seen(watchdog: LoopWatchdog, prompt: str) -> None:
    """Block the loop with calls into C that keep the interpreter lock; each takes twice as long as the one before."""
    num_before, size = watchdog.num_samples, 1_000_000
    while watchdog.num_samples == num_before:
        sum(range(size))
        size *= 2


async def handler(block: Callable[[LoopWatchdog, str], None], watchdog: LoopWatchdog) -> None:
    name_task("POST /v1/chat/completions")
    block(watchdog, "MY SECRET PROMPT")


@pytest.mark.parametrize("block", [computes_until_seen, keeps_the_lock_until_seen])
async def test_a_blocking_handler_is_named_with_its_route_and_line(block: Callable[[LoopWatchdog, str], None]) -> None:
    with watched() as here:
        await asyncio.create_task(handler(block, here.watchdog))
        stall = await here.next_stall("POST /v1/chat/completions")
    assert stall.seconds > 0.05
    assert stall.thread == "event loop"
    [innermost, *_, outermost] = stall.frames
    assert re.fullmatch(rf"tests\.tandem_runtime\.test_loop_lag:\d+ {block.__name__}", innermost)
    assert outermost.endswith(" handler")
    assert "SECRET" not in str(stall)


async def test_a_task_without_a_name_is_named_by_its_coroutine() -> None:
    async def sums() -> None:
        computes_until_seen(here.watchdog, "")

    with watched() as here:
        await asyncio.create_task(sums())
        stall = await here.next_stall(sums.__qualname__)
    assert stall.frames[1].endswith("sums")


async def test_a_callback_without_a_task_is_named_by_its_function() -> None:
    with watched() as here:
        asyncio.get_running_loop().call_soon(computes_until_seen, here.watchdog, "")
        stall = await here.next_stall("")
        while not any("computes_until_seen" in frame for frame in stall.frames):
            stall = await here.next_stall("")
    assert stall.thread == "event loop"


async def test_another_thread_that_keeps_the_lock_is_named() -> None:
    """As a tokenizer does in a thread of its own: the loop waits for the interpreter lock, not for a processor."""
    may_end, named = threading.Event(), asyncio.Event()

    def keeps_the_lock() -> None:
        size = 4_000_000
        while not may_end.is_set():
            sum(range(size))
            size = min(2 * size, 64_000_000)

    with watched() as here:
        thread = threading.Thread(target=keeps_the_lock, name="tokenizer")
        thread.start()
        try:
            async with asyncio.timeout(60):
                while not named.is_set():
                    stall = await here.next_stall("")
                    if stall.thread == "tokenizer" and stall.frames[0].endswith("keeps_the_lock"):
                        named.set()
        finally:
            may_end.set()
            thread.join()


async def test_a_loop_that_runs_reports_nothing_and_its_lag_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    monkeypatch.setattr(metrics, "_meter", MeterProvider([reader]).get_meter("tandem"))
    stalls: list[Stall] = []
    watchdog = LoopWatchdog(stall_seconds=60.0, on_stall=stalls.append)
    watchdog.start()
    try:
        async with asyncio.timeout(30):
            while (data := reader.get_metrics_data()) is None:
                await asyncio.get_running_loop().run_in_executor(None, lambda: None)
    finally:
        watchdog.stop()
    [metric] = data.resource_metrics[0].scope_metrics[0].metrics
    assert (metric.name, metric.unit) == ("tandem.loop.lag", "s")
    assert stalls == []


def test_many_stalls_make_few_lines_and_none_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lines = loop_lag._Lines()
    with structlog.testing.capture_logs() as logged:
        for _ in range(50):
            lines.stalled(Stall(0.1, 0.1, "POST /run", "event loop", ("control_plane.app:1 f",)))
        assert len(logged) == 20
        now += 1.0
        lines.stalled(Stall(0.1, 0.1, "POST /run", "event loop", ()))
    assert (logged[-1]["event"], logged[-1]["num_unlogged"]) == ("loop_stalled", 30)
    assert sum(1 + line["num_unlogged"] for line in logged) == 51


async def test_zero_switches_the_watchdog_off() -> None:
    before = threading.active_count()
    with loop_lag.watched(0):
        assert threading.active_count() == before
    with loop_lag.watched(0.05):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_a_turn_is_told_from_the_turns_before_and_from_waiting() -> None:
    """Two turns of some milliseconds, and a wait for a lock, are no long turn."""

    def compute(seconds: float) -> float:
        begun = time.thread_time()
        while time.thread_time() - begun < seconds:
            pass
        return time.thread_time() - begun

    async def turns() -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, TurnLoop)
        loop.turns.take_longest()
        computed = 0.0
        for _ in range(3):
            computed += compute(0.02)
            await asyncio.sleep(0)
        of_three = loop.turns.take_longest()
        held = threading.Event()
        threading.Timer(0.1, held.set).start()
        held.wait()
        await asyncio.sleep(0)
        return computed, of_three, loop.turns.take_longest()

    computed, of_three, of_a_wait = loop_turns.run(turns())
    assert 0.02 <= of_three < computed and of_a_wait < 0.02
