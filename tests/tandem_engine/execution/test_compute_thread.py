"""A long step runs on a thread of its own; a step that follows a short one runs where its result is asked for."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tandem_engine.core import Ticket
from tandem_engine.execution.compute_thread import ComputeThread
from tandem_engine.scheduling.batch import SchedulerOutput
from tandem_engine.scheduling.request import Sampled

_STEP = SchedulerOutput(1, ())


class _Runner:
    """Notes the threads that its steps run on."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.error: Exception | None = None

    def launch(self, output: SchedulerOutput, kv_written: Callable[[], None]) -> SchedulerOutput:
        self.threads.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        kv_written()
        return output

    def collect(self, ticket: object) -> Mapping[str, Sequence[Sampled]]:
        return {"a": [Sampled(7)]}

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def _beside(runner: Any, short_seconds: float) -> Iterator[ComputeThread]:
    thread = ComputeThread(runner, short_seconds)
    try:
        yield thread
    finally:
        thread.close()


def _step(thread: ComputeThread) -> tuple[Ticket, list[str]]:
    """Run a step to its end; return its ticket as it was launched, and the threads that wrote the KV."""
    written: list[str] = []
    ticket = thread.launch(_STEP, lambda: written.append(threading.current_thread().name))
    if ticket.is_running:
        assert thread.wake_fd is not None
        select.select([thread.wake_fd], [], [])
    assert thread.collect(ticket) == {"a": [Sampled(7)]}
    return ticket, written


def test_steps_run_on_the_thread_whatever_they_take_if_none_counts_as_short() -> None:
    runner = _Runner()
    with _beside(runner, 0.0) as thread:
        assert [_step(thread)[1] for _ in range(3)] == [["compute"]] * 3
    assert runner.threads == ["compute"] * 3


def test_a_step_that_follows_a_short_one_runs_in_collect() -> None:
    runner, here = _Runner(), threading.current_thread().name
    with _beside(runner, 3600.0) as thread:
        _step(thread)
        ticket, written = _step(thread)
        assert (ticket.is_running, written) == (False, [here])
    assert runner.threads == ["compute", here]


@pytest.mark.parametrize("short_seconds", [0.0, 3600.0])
def test_an_error_comes_from_collect(short_seconds: float) -> None:
    runner = _Runner()
    with _beside(runner, short_seconds) as thread:
        _step(thread)
        runner.error = RuntimeError("a broken kernel")
        ticket = thread.launch(_STEP)
        with pytest.raises(RuntimeError, match="a broken kernel"):
            thread.collect(ticket)
        runner.error = None
        _step(thread)
