"""An engine that hangs is noticed, one that computes for long is not; its requests move on, and it may come back."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

import pytest

from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_engine.messages import AbortRequest, Ping, Pong
from tandem_worker.engine_watch import TICK_SECONDS, EngineWatch
from tandem_worker.requests import GatewayStream
from tests.tandem_worker.scripted_engine import ScriptedEngine
from tests.tandem_worker.test_front import error_of, harness, received, submit


class World:
    """An engine, its processor time, and a clock that only `run_to` moves."""

    def __init__(self, *, is_busy: bool = True) -> None:
        self.now = 0.0
        self.engine = ScriptedEngine()
        self.said: list[tuple[str, float]] = []
        self.processor_seconds: Callable[[], float] = lambda: 0.0
        self.watch = EngineWatch(
            self.engine,
            10.0,
            is_busy=lambda: is_busy,
            on_silent=lambda seconds: self.said.append(("silent", seconds)),
            on_answer=lambda seconds: self.said.append(("answers", seconds)),
            processor_seconds=lambda pid: self.processor_seconds(),
        )

    def run_to(self, end: float) -> None:
        while self.now < end:
            self.now += TICK_SECONDS
            self.watch.tick(self.now)

    def hear(self) -> None:
        self.watch.heard(self.now)


def test_an_engine_that_neither_answers_nor_computes_is_silent_until_it_answers() -> None:
    world = World()
    # 1. It is asked after a second, once.
    world.run_to(1.0)
    assert world.engine.sent == [Ping()]
    # 2. Ten seconds later it is silent. This is said once.
    world.run_to(10.75)
    assert world.said == []
    world.run_to(60.0)
    assert world.said == [("silent", 11.0)] and world.watch.is_silent and len(world.engine.sent) == 1
    # 3. Any event ends that, and everything begins again.
    world.hear()
    assert world.said[1:] == [("answers", 60.0)] and not world.watch.is_silent
    world.run_to(71.0)
    assert world.said[2:] == [("silent", 11.0)]


def test_an_engine_is_asked_later_if_its_processor_time_cannot_be_read() -> None:
    world, missing = World(), OSError(errno.EMFILE, "Too many open files")

    def without_descriptors() -> float:
        raise missing

    world.processor_seconds = without_descriptors
    with pytest.raises(OSError, match="Too many open files"):
        world.run_to(1.0)
    world.processor_seconds = lambda: 0.0
    world.run_to(1.5)
    assert world.engine.sent == [Ping()], "else nobody would wait for an answer to what was never asked"
    world.hear()
    world.run_to(2.0)
    assert world.said == [] and not world.watch.is_silent


def test_an_engine_that_answers_is_asked_seldom_when_idle() -> None:
    world = World(is_busy=False)
    world.engine.answer = lambda command: world.hear()
    world.run_to(60.0)
    assert len(world.engine.sent) == 60 // 5 and world.said == []


def test_steps_that_are_heard_of_are_not_asked_about() -> None:
    world = World()
    for second in range(1, 60):
        world.run_to(0.75 * second)
        world.hear()
    assert world.engine.sent == []


def test_a_long_step_that_computes_is_no_silence_for_five_minutes() -> None:
    world = World()
    world.processor_seconds = lambda: world.now
    world.run_to(300.0)
    assert world.said == []
    world.run_to(302.0)
    assert world.said == [("silent", 301.0)]


def test_an_engine_that_stops_in_the_middle_of_a_step_is_silent_ten_seconds_later() -> None:
    world = World()
    world.processor_seconds = lambda: min(world.now, 20.0)
    world.run_to(29.75)
    assert world.said == []
    world.run_to(31.0)
    assert world.said == [("silent", 30.0)]


def test_a_front_that_slept_itself_does_not_count_its_sleep() -> None:
    world = World()
    world.run_to(5.0)
    world.now += 100.0  # the machine was suspended: front and engine slept
    world.run_to(world.now + 5.0)
    assert world.said == []
    world.run_to(world.now + 2.0)
    assert [what for what, _ in world.said] == ["silent"]


async def test_requests_of_a_silent_engine_move_on_and_it_takes_no_new_ones_until_it_answers() -> None:
    async with harness() as here:
        changes: list[int] = []
        here.front.state.when_changed(lambda: changes.append(here.front.load().state))
        stream = GatewayStream()
        here.front.submit(stream, submit("running"))
        here.front.submit(stream, submit("left"))
        here.front.cancel(stream, pb.Cancel(request_id="left"))
        # 1. It falls silent: its requests fail so that they move, and it is told to forget them.
        here.front.state.watch.is_silent = True
        here.front.state.silent(11.0)
        assert {error_of(event) for event in await received(stream, 2)} == {"Unavailable", "Cancelled"}
        assert AbortRequest("running.0") in here.engine.sent
        # 2. The worker reports that it takes nothing, and refuses what comes all the same.
        assert changes == [pb.WORKER_STATE_LOADING]
        assert here.front.load().load_stage == "the engine process does not answer"
        here.front.submit(stream, submit("new"))
        assert [error_of(event) for event in await received(stream, 1)] == ["Unavailable"]
        # 3. It answers: the worker is as before. Late answers of the engine find nobody.
        here.engine.emit(messages.RequestAborted("running.0"))
        here.engine.emit(Pong())
        here.front.submit(stream, submit("bad", model=pb.ModelRef(model_id="other")))
        await received(stream, 1)
        while here.front.state.watch.is_silent:  # noqa: ASYNC110 - the watch tells nobody
            await asyncio.sleep(0)
        assert here.front.load().state == pb.WORKER_STATE_READY and changes[-1] == pb.WORKER_STATE_READY
