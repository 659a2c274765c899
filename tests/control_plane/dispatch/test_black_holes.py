"""A sick worker costs no request its answer: it gets nothing more after a few requests, and is back once it is well."""

from __future__ import annotations

import asyncio
import time

import pytest

from control_plane.fleet.call_watch import HealthState
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import (
    ContextTooLong,
    DeadlineExceeded,
    FingerprintMismatch,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    TandemError,
    Unavailable,
    Unsupported,
)
from tests.control_plane.harness import FULL, Harness, answer, harness, new_request, tokens_of
from tests.control_plane.scripted_worker import (
    PREFILL,
    AttachStream,
    Behaviour,
    ScriptedWorker,
    fail_after,
    lose_after,
    only_accept,
    refuse_with,
    serve,
    silent,
)
from tests.ports import free_ports
from tests.tandem_worker.kv_harness import until

FIRST = 10
"""Requests that a sick worker may get before it gets no more."""
STANDSTILL = 0.5
"""Seconds that this process may stand still: the gateway leaves them out, and the tests' clock has none of them."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def ask(here: Harness, number: int = 0) -> None:
    stream = await here.dispatcher.submit(new_request(request_id=f"r{number}"))
    assert await tokens_of(stream) == [answer()]


async def ask_past(here: Harness, clock: Clock, number: int) -> None:
    """Ask, and let time pass until the answer is there."""
    asked = asyncio.create_task(ask(here, number))
    while not asked.done():
        await asyncio.wait([asked], timeout=0.01)
        clock.now += 0.05
    await asked


def state_of(here: Harness, worker: ScriptedWorker) -> HealthState:
    (found,) = [each for each in here.registry.workers() if each.worker_id == worker.worker_id]
    return here.health.status(found).state


async def until_reinstated(here: Harness, worker: ScriptedWorker) -> int:
    """Ask until a worker is used again; return how many requests that took."""
    for number in range(20):
        if state_of(here, worker) == "ok":
            return number
        await ask(here, 100 + number)
        await until(lambda: not here.dispatcher.background)
    raise AssertionError(f"{worker.worker_id} is {state_of(here, worker)}")


SICK: dict[str, Behaviour] = {
    "its clock is an hour ahead": refuse_with(DeadlineExceeded("the deadline has passed")),
    "refuses as invalid": refuse_with(InvalidRequest("unknown field")),
    "refuses as unsupported": refuse_with(Unsupported("not built")),
    "refuses as too long": refuse_with(ContextTooLong("too long")),
    "does not know the model": refuse_with(ModelNotFound("no such model")),
    "has another fingerprint": refuse_with(FingerprintMismatch("another fingerprint")),
    "fails": refuse_with(InternalError("broken")),
    "cannot reach its engine": refuse_with(Unavailable("no engine")),
    "fails after it accepted": fail_after(0, InternalError("broken")),
    "has no time left after it accepted": fail_after(1, DeadlineExceeded("the deadline has passed")),
    "loses its stream": lose_after(0),
}


@pytest.mark.parametrize("behave", SICK.values(), ids=list(SICK))
async def test_a_worker_that_does_nothing_right_costs_no_answer_and_comes_back(behave: Behaviour) -> None:
    clock, sick = Clock(), ScriptedWorker("a", behave=behave)
    async with harness(sick, ScriptedWorker("b"), ScriptedWorker("c"), queue_seconds=10, clock=clock) as here:
        for number in range(FIRST):  # 1. it is found out
            await ask(here, number)
            await until(lambda: state_of(here, sick) != "detached")
        assert state_of(here, sick) == "ejected"
        num_submits = len(sick.submits)
        for number in range(FIRST, 3 * FIRST):  # 2. it gets no more
            await ask(here, number)
        assert len(sick.submits) == num_submits
        clock.now += 1.0 + STANDSTILL
        assert state_of(here, sick) == "probation"
        await ask(here, 3 * FIRST)  # 3. it is tried with a copy, and fails
        await until(lambda: not here.dispatcher.background and state_of(here, sick) == "ejected")
        assert len(sick.submits) == num_submits + 1
        sick.behave = serve  # 4. it is well, and used again
        clock.now += 2.0 + STANDSTILL
        assert await until_reinstated(here, sick) <= 3
        assert not here.dispatcher.background


@pytest.mark.parametrize("behave", [silent, only_accept], ids=["silent", "only_accept"])
async def test_a_worker_that_never_answers_is_left_and_comes_back(behave: Behaviour) -> None:
    clock, sick = Clock(), ScriptedWorker("a", behave=behave)
    async with harness(sick, ScriptedWorker("b"), ScriptedWorker("c"), queue_seconds=10, clock=clock) as here:
        for number in range(FIRST):
            await ask_past(here, clock, number)
        assert state_of(here, sick) != "ok"
        num_submits = len(sick.submits)
        for number in range(FIRST, 3 * FIRST):
            await ask(here, number)
        await until(lambda: all(len(sick.cancels) == num for num in [len(sick.submits)]))
        assert len(sick.submits) <= num_submits + 1  # a trial at most: time stood still
        sick.behave = serve
        clock.now += 8.0
        await until(lambda: not here.dispatcher.background)
        assert await until_reinstated(here, sick) <= 4


async def test_all_choices_leave_a_worker_that_brings_no_token() -> None:
    """Only the first one is watched: the others waited there until the request's deadline."""
    clock, sick = Clock(), ScriptedWorker("a", behave=only_accept)
    async with harness(sick, ScriptedWorker("b"), ScriptedWorker("c"), queue_seconds=10, clock=clock) as here:
        stream = await here.dispatcher.submit(new_request(num_choices=3))
        assert len(sick.submits) == 3
        asked = asyncio.create_task(tokens_of(stream))
        while not asked.done():
            await asyncio.wait([asked], timeout=0.01)
            clock.now += 0.05
            assert clock.now < 30
        assert await asked == [answer()] * 3
        await sick.until(lambda worker: len(worker.cancels) == 3)


async def test_a_worker_that_falls_silent_is_avoided_at_once_and_its_calls_move_when_peers_have_answered() -> None:
    clock, sick = Clock(), ScriptedWorker("a")
    async with harness(sick, ScriptedWorker("b"), ScriptedWorker("c"), clock=clock) as here:
        calls = [asyncio.create_task(ask(here, number)) for number in range(9)]  # all three answer
        await asyncio.gather(*calls)
        sick.behave = only_accept
        waiting = asyncio.create_task(ask(here, 10))
        await sick.until(lambda sick: sick.submits[-1].request_id == "r10-0")
        clock.now += 0.5
        num_submits = len(sick.submits)
        for number in range(11, 16):
            await ask(here, number)
        assert len(sick.submits) == num_submits and not waiting.done()
        clock.now += 1.0
        await waiting
        assert state_of(here, sick) == "ok"  # one call is no proof


async def test_a_prefill_worker_that_accepts_and_does_nothing_costs_no_answer() -> None:
    clock, sick = Clock(), ScriptedWorker("p", PREFILL, only_accept)

    async def wait_for_the_prompt(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        comes = sick.behave is serve or submit.handle.prefill_incarnation != sick.incarnation
        await (serve if comes else only_accept)(worker, attach, submit)

    decode = ScriptedWorker("d", behave=wait_for_the_prompt)
    async with harness(sick, ScriptedWorker("q", PREFILL), decode, clock=clock) as here:
        for number in range(FIRST):
            await ask_past(here, clock, number)
        num_submits = len(sick.submits)
        assert state_of(here, sick) != "ok" and state_of(here, decode) == "ok"
        for number in range(FIRST, 2 * FIRST):
            await ask(here, number)
        assert len(sick.submits) <= num_submits + 1
        sick.behave = serve
        clock.now += 8.0
        await until(lambda: not here.dispatcher.background)
        assert await until_reinstated(here, sick) <= 4


async def test_a_worker_that_cannot_be_reached_gets_nothing() -> None:
    (port,) = free_ports(1)
    async with harness(ScriptedWorker("b")) as here:
        lost = ScriptedWorker("a")
        lost.address = f"127.0.0.1:{port}"
        lost.register(here.registry)
        for number in range(FIRST):
            await ask(here, number)
        assert state_of(here, lost) == "detached"
        assert not lost.submits


async def test_a_request_waits_for_its_only_worker_to_be_attached() -> None:
    (port,) = free_ports(1)
    async with harness(queue_seconds=10) as here:
        late = ScriptedWorker("a")
        late.address = f"127.0.0.1:{port}"
        late.register(here.registry)
        waiting = asyncio.create_task(ask(here))
        await until(lambda: len(here.dispatcher.queue) == 1)
        here.registry.deregister("a", late.incarnation)
        await here.add(ScriptedWorker("a", life=1))
        await waiting


@pytest.mark.parametrize("error", [InvalidRequest("bad"), ContextTooLong("long"), DeadlineExceeded("passed")])
async def test_the_only_worker_is_believed(error: TandemError) -> None:
    only = ScriptedWorker("a", behave=refuse_with(error))
    async with harness(only, queue_seconds=10) as here:
        for number in range(2 * FIRST):
            with pytest.raises(type(error), match=error.message):
                await here.dispatcher.submit(new_request(request_id=f"r{number}"))
        assert state_of(here, only) == "ok"
        only.behave = serve
        await ask(here)


@pytest.mark.parametrize("behave", [fail_after(0, InvalidRequest("bad")), fail_after(1, InvalidRequest("bad"))])
async def test_a_final_failure_of_the_only_worker_is_told_at_once(behave: Behaviour) -> None:
    async with harness(ScriptedWorker("a", behave=behave), queue_seconds=60) as here:
        with pytest.raises(InvalidRequest, match="bad"):
            await asyncio.wait_for(tokens_of(await here.dispatcher.submit(new_request())), 10)


async def test_two_workers_that_agree_are_right_and_none_of_them_is_blamed() -> None:
    workers = [ScriptedWorker(name, behave=refuse_with(InvalidRequest("bad"))) for name in "ab"]
    async with harness(*workers) as here:
        for number in range(FIRST):
            with pytest.raises(InvalidRequest, match="bad"):
                await here.dispatcher.submit(new_request(request_id=f"r{number}"))
        assert [state_of(here, worker) for worker in workers] == ["ok", "ok"]


async def test_two_clocks_that_are_ahead_are_not_believed_while_a_third_worker_is_left() -> None:
    ahead = [ScriptedWorker(name, behave=SICK["its clock is an hour ahead"]) for name in "ab"]
    async with harness(*ahead, ScriptedWorker("c")) as here:
        for number in range(FIRST):
            await ask(here, number)
        assert [state_of(here, worker) for worker in ahead] == ["ejected", "ejected"]


async def test_a_full_worker_is_not_sick() -> None:
    full = ScriptedWorker("a", behave=refuse_with(FULL))
    async with harness(full, ScriptedWorker("b")) as here:
        for number in range(FIRST):
            await ask(here, number)
        assert state_of(here, full) == "ok"


async def test_probes_do_not_count() -> None:
    sick = ScriptedWorker("a", behave=SICK["fails"])
    async with harness(sick, ScriptedWorker("b")) as here:
        for number in range(FIRST):
            stream = await here.dispatcher.submit(new_request(request_id=f"probe-{number}", is_probe=True))
            assert await tokens_of(stream) == [answer()]
        assert state_of(here, sick) == "ok"


async def test_a_model_whose_workers_are_all_ejected_is_still_served() -> None:
    clock, workers = Clock(), [ScriptedWorker(name, behave=SICK["fails"]) for name in "ab"]
    async with harness(*workers, clock=clock) as here:
        for number in range(FIRST):
            with pytest.raises(TandemError):
                await ask(here, number)
        assert [state_of(here, worker) for worker in workers] == ["ejected", "ejected"]
        workers[1].behave = serve
        clock.now += 0.1
        for number in range(FIRST, 2 * FIRST):
            await ask(here, number)
        await until(lambda: not here.dispatcher.background)
        assert state_of(here, workers[1]) == "ok"


async def test_a_deadline_that_has_passed_here_is_no_workers_fault() -> None:
    mute = ScriptedWorker("a", behave=silent)
    async with harness(mute, ScriptedWorker("b"), clock=Clock()) as here:
        for number in range(4):
            late = new_request(request_id=f"r{number}", deadline=time.monotonic() - 1.0)
            with pytest.raises(DeadlineExceeded):
                await here.dispatcher.submit(late)
        assert state_of(here, mute) == "ok"


async def test_a_trial_is_a_copy_for_one_token_and_leaves_nothing() -> None:
    clock, sick = Clock(), ScriptedWorker("a", behave=SICK["fails"])
    async with harness(sick, ScriptedWorker("b"), clock=clock) as here:
        for number in range(3):
            await ask(here, number)
        assert state_of(here, sick) == "ejected"
        sick.behave = serve
        clock.now += 1.0
        await ask(here, 4)
        await until(lambda: not here.dispatcher.background)
        trials = [submit for submit in sick.submits if "-trial-" in submit.request_id]
        assert len(trials) == 3 and len({trial.request_id for trial in trials}) == 3
        assert all(trial.sampling.max_tokens == 1 and not trial.HasField("handle") for trial in trials)
        assert all(trial.num_prompt_tokens == 40 for trial in trials)
        assert state_of(here, sick) == "ok"
