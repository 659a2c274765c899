"""Tests of background tasks: they are kept, ended together, and their exceptions are logged."""

from __future__ import annotations

import asyncio
import gc

import pytest
import structlog.testing

from tandem_runtime.tasks import TaskSet


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
