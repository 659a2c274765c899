"""Crash loops do not multiply the load, and requests that kill workers kill no more of them."""

from __future__ import annotations

import time

import pytest

from control_plane.dispatch.admission import Quarantine, Quarantined, RetryBudget
from control_plane.generation import TokenRequest
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import InternalError, Overloaded, Unavailable
from tests.control_plane.harness import answer, harness, new_request, tokens_of
from tests.control_plane.scripted_worker import (
    PREFILL,
    AttachStream,
    ScriptedWorker,
    fail_after,
    lose_after,
    only_accept,
    serve,
)
from tests.tandem_worker.kv_harness import until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def lose_one_further(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
    """Lose the stream after one more token, and serve all later requests."""
    worker.behave = serve
    await lose_after(1)(worker, attach, submit)


def test_retries_are_a_fifth_of_the_requests_and_a_burst() -> None:
    clock = Clock()
    budget = RetryBudget(burst=2, clock=clock)
    for _ in range(2):
        budget.take(is_first=False)
    with pytest.raises(Overloaded) as refused:
        budget.take(is_first=False)
    assert refused.value.retry_after_seconds == 5.0
    for _ in range(5):
        budget.earn()
    budget.take(is_first=False)
    with pytest.raises(Overloaded):
        budget.take(is_first=False)
    clock.now += 5.0
    budget.take(is_first=False)
    clock.now += 1000.0
    for _ in range(2):
        budget.take(is_first=False)
    with pytest.raises(Overloaded):
        budget.take(is_first=False)


def test_what_a_request_loses_first_costs_nothing() -> None:
    budget = RetryBudget(burst=1, clock=Clock())
    for _ in range(500):
        budget.take(is_first=True)
    budget.take(is_first=False)


async def test_beyond_the_budget_a_stream_waits_instead_of_failing() -> None:
    clock = Clock()
    budget = RetryBudget(burst=1, clock=clock)
    budget.take(is_first=False)
    workers = [ScriptedWorker(name, behave=lose_one_further) for name in "ab"]
    async with harness(*workers, queue_seconds=10, budget=budget) as here:
        stream = await here.dispatcher.submit(new_request())
        deltas = aiter(stream)
        tokens = [*(await anext(deltas)).token_ids, *(await anext(deltas)).token_ids]
        await until(lambda: len(here.dispatcher.queue) == 1)
        clock.now += 10.0
        tokens += [token async for delta in deltas for token in delta.token_ids]
        assert tokens == answer()


async def test_a_prompt_under_which_three_workers_died_is_tried_no_more() -> None:
    workers = [ScriptedWorker(name, behave=lose_after(0)) for name in "abcd"]
    async with harness(*workers, queue_seconds=10) as here:
        stream = await here.dispatcher.submit(new_request())
        with pytest.raises(Quarantined, match="three workers as each of them died; it is quarantined") as first:
            await tokens_of(stream)
        assert first.value.http_status == 500
        assert [len(worker.submits) for worker in workers] == [1, 1, 1, 0]
        with pytest.raises(Quarantined) as again:
            await here.dispatcher.submit(new_request(request_id="again"))
        assert again.value.message == first.value.message
        workers[3].behave = only_accept
        for change in ({"account": "other"}, {"token_ids": (1, 2, 3)}):
            await (await here.dispatcher.submit(new_request(request_id=str(change), **change))).aclose()
        assert len(workers[3].submits) + sum(len(worker.submits) - 1 for worker in workers[:3]) == 2


async def test_prefills_death_counts_as_one_of_them() -> None:
    prefill = ScriptedWorker("p", PREFILL, lose_after(0))
    workers = [ScriptedWorker(name, behave=lose_after(0)) for name in "abc"]
    async with harness(prefill, *workers, queue_seconds=10) as here:
        with pytest.raises(Quarantined):
            await tokens_of(await here.dispatcher.submit(new_request()))
        assert [len(worker.submits) for worker in workers] == [1, 1, 0]


async def test_who_gets_on_between_two_deaths_is_not_their_cause() -> None:
    workers = [ScriptedWorker(name, behave=lose_one_further) for name in "abcd"]
    async with harness(*workers, queue_seconds=10) as here:
        assert await tokens_of(await here.dispatcher.submit(new_request(max_tokens=8))) == [answer(8)]


async def test_failures_of_living_workers_are_not_deaths() -> None:
    workers = [ScriptedWorker(name, behave=fail_after(0, InternalError("a bug"))) for name in "abc"]
    async with harness(*workers, ScriptedWorker("d"), queue_seconds=10) as here:
        assert await tokens_of(await here.dispatcher.submit(new_request())) == [answer()]
        assert len(here.dispatcher.quarantine) == 0


def request(account: str = "me", is_probe: bool = False, num: int = 1) -> TokenRequest:
    return new_request(account=account, is_probe=is_probe, token_ids=(num,), deadline=time.monotonic() + 1)


def test_a_quarantine_ends_and_is_bounded_and_probes_are_never_in_it() -> None:
    clock = Clock()
    quarantine = Quarantine(clock)
    quarantine.put(request(is_probe=True))
    assert len(quarantine) == 0
    quarantine.put(request())
    clock.now += 599.0
    with pytest.raises(Quarantined):
        quarantine.check(request())
    quarantine.check(request(is_probe=True))
    quarantine.check(request(account="other"))
    clock.now += 1.0
    quarantine.check(request())
    for number in range(1100):
        quarantine.put(request(num=number))
    assert len(quarantine) == 1000
    assert not issubclass(Quarantined, Unavailable)
