"""Tests of background tasks: they are kept, ended together, restarted, and their exceptions are logged."""

from __future__ import annotations

import asyncio
import gc

import pytest
import structlog.testing
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

from tandem_runtime import metrics
from tandem_runtime.tasks import FewPerTurn, TaskSet, Turns, supervised
from tests.loop_turns import counted_turns


async def test_a_task_is_kept_until_it_ends() -> None:
    tasks, may_end = TaskSet(), asyncio.Event()
    task = tasks.spawn(may_end.wait())
    gc.collect()
    assert list(tasks) == [task]
    may_end.set()
    await tasks.join()
    assert len(tasks) == 0 and task.result() is True


async def test_cancel_ends_all_tasks_and_waits_for_their_clean_up() -> None:
    tasks, cleaned_up, has_started = TaskSet(), [], asyncio.Event()

    async def forever() -> None:
        try:
            has_started.set()
            await asyncio.Event().wait()
        finally:
            cleaned_up.append("yes")

    tasks.spawn(forever())
    await has_started.wait()
    await tasks.cancel()
    assert cleaned_up == ["yes"] and len(tasks) == 0


async def test_an_exception_that_nobody_awaits_is_logged_and_ends_no_other_task() -> None:
    tasks, may_end = TaskSet(), asyncio.Event()

    async def fails() -> None:
        raise ValueError("a defect")

    with structlog.testing.capture_logs() as lines:
        failed, other = tasks.spawn(fails(), name="fails"), tasks.spawn(may_end.wait())
        await asyncio.wait([failed])
        await asyncio.sleep(0)
        assert not other.done()
    may_end.set()
    await tasks.join()
    assert [(line["event"], line["task"]) for line in lines] == [("background_task_failed", "fails")]
    with pytest.raises(ValueError, match="a defect"):
        failed.result()


class Clock:
    """A clock that only pauses and loops of a test advance."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


async def test_a_loop_that_fails_is_logged_and_runs_again_until_it_is_well() -> None:
    clock, num_runs = Clock(), 0

    async def loop() -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs < 4:
            raise KeyError("a prompt")

    with structlog.testing.capture_logs() as lines:
        await supervised("sweep", loop, clock=clock, pause=clock.pause)
    assert num_runs == 4
    assert [(line["event"], line["task"], line["kind"], line["num_in_a_row"]) for line in lines] == [
        ("background_loop_failed", "sweep", "KeyError", number) for number in (1, 2, 3)
    ]
    assert all("a prompt" not in str(value) for line in lines for key, value in line.items() if key != "exc_info")


async def test_pauses_grow_to_a_limit_with_jitter_and_start_over_after_a_minute_of_health() -> None:
    clock, lives = Clock(), [0.0] * 12 + [59.0, 61.0]

    async def loop() -> None:
        if not lives:
            return
        clock.now += lives.pop(0)
        raise RuntimeError("a defect")

    await supervised("prober", loop, clock=clock, pause=clock.pause)
    longest = [min(30.0, 0.1 * 2**number) for number in range(12)] + [30.0, 0.1]
    assert all(most / 2 <= seconds <= most for most, seconds in zip(longest, clock.pauses, strict=True))
    assert len({seconds / most for most, seconds in zip(longest, clock.pauses, strict=True)}) > 1


async def test_a_supervised_loop_can_be_cancelled_while_it_runs_and_while_it_pauses() -> None:
    started, pausing = asyncio.Event(), asyncio.Event()

    async def endless(_: float = 0.0) -> None:
        (pausing if _ else started).set()
        await asyncio.Event().wait()

    async def fails() -> None:
        raise RuntimeError("a defect")

    running = asyncio.create_task(supervised("runs", endless))
    waiting = asyncio.create_task(supervised("fails", fails, pause=endless))
    await asyncio.gather(started.wait(), pausing.wait())
    for task in (running, waiting):
        task.cancel()
    await asyncio.wait([running, waiting])
    assert running.cancelled() and waiting.cancelled()


async def test_a_failure_is_counted_by_the_name_of_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    monkeypatch.setattr(metrics, "_meter", MeterProvider([reader]).get_meter("tandem"))
    clock, failures = Clock(), [RuntimeError("one"), RuntimeError("two")]

    async def loop() -> None:
        if failures:
            raise failures.pop()

    await supervised("auditor", loop, clock=clock, pause=clock.pause)
    data = reader.get_metrics_data()
    assert data is not None
    [metric] = data.resource_metrics[0].scope_metrics[0].metrics
    assert metric.name == "tandem.background.failures"
    [point] = metric.data.data_points
    assert isinstance(point, NumberDataPoint)
    assert (point.attributes, point.value) == ({"tandem.task": "auditor"}, 2)


async def test_work_that_begins_together_is_spread_over_turns_of_the_loop_in_order() -> None:
    turns, worked = Turns(), []

    async def work(number: int) -> None:
        await turns.next()
        worked.append((number, counted.now))

    with counted_turns() as counted:
        await asyncio.gather(*(work(number) for number in range(100)))
    assert [number for number, _ in worked] == list(range(100))
    assert len({turn for _, turn in worked}) == 100


async def test_a_few_tasks_go_on_at_once_and_of_a_crowd_one_in_each_turn_beside_them() -> None:
    few, worked = FewPerTurn(8), list[int]()

    async def work() -> None:
        await few.next()
        worked.append(counted.now)

    with counted_turns() as counted:
        for _ in range(8):
            await work()
        assert len({*worked}) == 1, "nobody waited"
        await asyncio.sleep(0)
        worked.clear()
        await asyncio.gather(*(work() for _ in range(100)))
    numbers = [worked.count(turn) for turn in {*worked}]
    assert sum(numbers) == 100 and max(numbers) <= 9


async def test_one_that_leaves_before_its_turn_keeps_nobody_waiting() -> None:
    turns, went_on = Turns(), asyncio.Event()

    async def work() -> None:
        await turns.next()
        went_on.set()

    waiting = [asyncio.create_task(work()) for _ in range(3)]
    for task in waiting[:2]:
        await asyncio.sleep(0)
        task.cancel()
    async with asyncio.timeout(10):
        await went_on.wait()
    assert [task.cancelled() for task in waiting[:2]] == [True, True]
