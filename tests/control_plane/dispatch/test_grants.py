"""A gateway sends what workers have granted and no more, tells them what waits, and estimates the room of others."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from control_plane.admission.model_admission import Waiter
from tandem.v1 import types_pb2 as pb
from tests.control_plane.dispatch.test_rooms import wait_for
from tests.control_plane.harness import FULL, PROMPT, Harness, answer, harness, new_request, tokens_of
from tests.control_plane.scripted_worker import (
    MODEL,
    AttachStream,
    ScriptedWorker,
    only_accept,
    refuse_with,
    serve,
    silent,
)
from tests.tandem_worker.kv_harness import until

LIVE_MS = 60_000


def worker_with(num_requests: int, **fields: Any) -> ScriptedWorker:
    """A worker that runs something, and grants so many requests."""
    worker = ScriptedWorker("a", **fields)
    worker.grant = pb.Grant(number=1, num_tokens=10_000, num_requests=num_requests, valid_ms=LIVE_MS)
    return worker


async def granted(here: Harness, worker: ScriptedWorker) -> AttachStream:
    """Let the gateway know that the worker runs requests of others, and return its stream once it has the grant."""
    here.report(worker, num_running=3)
    await until(lambda: (found := here.links.attachment(worker.incarnation)) is not None and found.grant is not None)
    return worker.streams[-1]


async def end(waiting: list[asyncio.Task[Any]]) -> None:
    """Let all leave: those that wait, and those whose answers have begun."""
    for each in waiting:
        if each.done():
            await each.result().aclose()
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_no_more_is_sent_than_was_granted_and_the_rest_as_soon_as_more_is() -> None:
    worker = worker_with(2, behave=only_accept)
    async with harness(worker, queue_seconds=60) as here:
        stream = await granted(here, worker)
        waiting = wait_for(here, MODEL, "vwxyz")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 3)
        await worker.until(lambda worker: len(worker.submits) == 2)
        assert [submit.grant_tokens for submit in worker.submits] == [len(PROMPT)] * 2
        assert here.dispatcher.rooms.num_granted() == {(MODEL, "decode"): 0}
        stream.grant(pb.Grant(number=2, num_tokens=10_000, num_requests=4, valid_ms=LIVE_MS))
        await worker.until(lambda worker: len(worker.submits) == 4)
        assert here.dispatcher.queue.num_waiting(MODEL) == 1
        stream.grant(pb.Grant(number=3, num_tokens=5 * len(PROMPT) - 1, num_requests=9, valid_ms=LIVE_MS))
        stream.grant(pb.Grant(number=4, num_tokens=5 * len(PROMPT), num_requests=9, valid_ms=LIVE_MS))
        await worker.until(lambda worker: len(worker.submits) == 5)
        await end(waiting)


async def test_reports_of_free_memory_do_not_send_what_was_not_granted() -> None:
    worker = worker_with(1, behave=only_accept)
    async with harness(worker, queue_seconds=60) as here:
        stream = await granted(here, worker)
        waiting = wait_for(here, MODEL, "yz")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 1)
        for _ in range(3):
            here.report(worker, num_running=3)
        stream.grant(pb.Grant(number=2, num_tokens=1, num_requests=1, valid_ms=LIVE_MS))
        await worker.until(lambda worker: any(demand.grant_number == 2 for demand in worker.demands))
        assert len(worker.submits) == 1
        await end(waiting)


async def test_workers_hear_what_waits_by_account_and_when_nothing_does_any_more() -> None:
    worker = worker_with(0, behave=serve)
    async with harness(worker, queue_seconds=60) as here:
        stream = await granted(here, worker)
        waiting = wait_for(here, MODEL, "xyy")
        await worker.until(lambda worker: worker.waiting.num_requests == 3)
        demand = worker.waiting
        size = len(PROMPT)
        assert (demand.num_tokens, demand.first_tokens, demand.first_requests) == (3 * size, size, 1)
        assert sorted((each.fairness_key, each.num_requests) for each in demand.accounts) == [("x", 1), ("y", 2)]
        assert all(each.work > 0 for each in demand.accounts)
        stream.grant(pb.Grant(number=2, num_tokens=10_000, num_requests=3, valid_ms=LIVE_MS))
        for each in waiting:
            assert await tokens_of(await each) == [answer()]  # type: ignore[arg-type]
        await worker.until(lambda worker: worker.waiting.num_requests == 0)


async def test_an_explanation_has_what_the_grant_left_before_the_request() -> None:
    worker = worker_with(3)
    async with harness(worker) as here:
        await granted(here, worker)
        stream = await here.dispatcher.submit(new_request())
        assert await tokens_of(stream) == [answer()]
        (call,) = stream.state.history.calls
        assert call.grant is not None
        assert (call.grant.number, call.grant.num_requests, call.grant.num_tokens) == (1, 3, 10_000)
        assert here.dispatcher.rooms.num_granted() == {(MODEL, "decode"): 2}


async def test_a_worker_hears_that_a_lower_grant_has_come() -> None:
    worker = worker_with(5)
    async with harness(worker) as here:
        stream = await granted(here, worker)
        stream.grant(pb.Grant(number=2, num_tokens=10_000, num_requests=1, valid_ms=LIVE_MS))
        await worker.until(lambda worker: [demand.grant_number for demand in worker.demands] == [2])


async def test_accounts_have_their_turns_in_the_workers_order() -> None:
    worker = worker_with(0, behave=only_accept)
    async with harness(worker, queue_seconds=60) as here:
        stream = await granted(here, worker)
        waiting = wait_for(here, MODEL, "xxxxyyyy")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 8)
        turns = [turn("y", lead=0.0), turn("x", lead=1e6)]
        stream.grant(pb.Grant(number=2, num_tokens=10_000, num_requests=5, valid_ms=LIVE_MS, turns=turns))
        await worker.until(lambda worker: len(worker.submits) == 5)
        accounts = [submit.fairness_key for submit in worker.submits]
        assert accounts == [*"yyyyx"], "x has used more of the worker, at other gateways"
        await end(waiting)


async def test_a_worker_hears_what_a_request_is_charged_for() -> None:
    worker = worker_with(2)
    async with harness(worker) as here:
        await granted(here, worker)
        assert await tokens_of(await here.dispatcher.submit(new_request(account="x"))) == [answer()]
        (submit,) = worker.submits
        prices = here.dispatcher.queue.room(MODEL).prices
        assert submit.fairness_key == "x" and 0 < submit.work_of_answer <= prices.answer_tokens
        assert submit.work > submit.work_of_answer, "the prompt is computed there, too"


async def test_a_wait_is_predicted_with_what_waits_at_other_gateways() -> None:
    worker = worker_with(0, behave=only_accept)
    async with harness(worker, queue_seconds=60) as here:
        stream = await granted(here, worker)
        waiting = wait_for(here, MODEL, "xx")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 2)

        def predicted() -> float:
            found = here.dispatcher.queue.room(MODEL).predicted_wait_seconds(Waiter(MODEL, "x"), time.monotonic())
            return found or 0.0

        own = predicted()
        assert own > 0
        waiting_here = sum(each.work for each in here.dispatcher.queue.room(MODEL))
        turns = [turn("x", num_elsewhere=6, work_elsewhere=3 * waiting_here)]
        stream.grant(pb.Grant(number=2, num_tokens=0, num_requests=0, valid_ms=LIVE_MS, turns=turns))
        await until(lambda: predicted() == pytest.approx(4 * own, rel=0.05))
        standing = here.dispatcher.queue.standing(Waiter(MODEL, "x"))
        assert (standing.num_waiting, standing.num_waiting_elsewhere) == (2, 6)
        await end(waiting)


def turn(account: str, **fields: float) -> pb.AccountTurn:
    return pb.AccountTurn(fairness_key=account, **fields)  # type: ignore[arg-type]


async def test_an_account_whose_client_leaves_before_the_worker_answers_is_charged_for_nothing() -> None:
    worker = worker_with(2, behave=silent)
    async with harness(worker, queue_seconds=60) as here:
        await granted(here, worker)
        asked = asyncio.create_task(here.dispatcher.submit(new_request(account="x")))
        await worker.until(lambda worker: len(worker.submits) == 1)
        counters = here.dispatcher.queue.room(MODEL).counters[0]
        assert counters.of("x") > 0.0
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert counters.of("x") == 0.0


async def test_a_refusal_brings_the_next_grant() -> None:
    worker = worker_with(1, behave=refuse_with(FULL))
    worker.grant_with_refusal = pb.Grant(number=2, num_tokens=10_000, num_requests=1, valid_ms=LIVE_MS)
    async with harness(worker, queue_seconds=60) as here:
        stream = await granted(here, worker)
        waiting = wait_for(here, MODEL, "z")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 1)
        assert len(worker.submits) == 1
        worker.behave = serve
        stream.grant(pb.Grant(number=3, num_tokens=10_000, num_requests=2, valid_ms=LIVE_MS))
        assert await tokens_of(await waiting[0]) == [answer()]  # type: ignore[arg-type]
        assert len(worker.submits) == 2


async def test_a_new_stream_begins_without_what_was_sent_on_the_one_before() -> None:
    worker = worker_with(1)
    async with harness(worker, queue_seconds=60) as here:
        stream = await granted(here, worker)
        for num_streams in (1, 2):
            here.report(worker, num_running=3)
            assert await tokens_of(await here.dispatcher.submit(new_request())) == [answer()]
            assert here.links.attachment(worker.incarnation).left().num_requests == 0  # type: ignore[union-attr]
            stream.events.put_nowait(None)
            await worker.until(lambda worker, num=num_streams: len(worker.hellos) == num + 1)  # type: ignore[misc]
            stream = await granted(here, worker)


async def test_a_worker_whose_grant_has_expired_gets_a_few_requests_by_the_estimate() -> None:
    worker = worker_with(1, behave=only_accept)
    assert worker.grant is not None
    worker.grant.valid_ms = 0
    async with harness(worker, queue_seconds=60) as here:
        await granted(here, worker)
        waiting = wait_for(here, MODEL, "uvwxyz")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 2)
        await worker.until(lambda worker: len(worker.submits) == 4)
        await end(waiting)


async def test_a_worker_of_the_release_before_hears_nothing_of_grants_and_its_room_is_estimated() -> None:
    worker = ScriptedWorker("a", behave=only_accept)
    async with harness(worker, queue_seconds=60) as here:
        here.report(worker, num_running=3)
        waiting = wait_for(here, MODEL, "xyz")
        await worker.until(lambda worker: len(worker.submits) == 3)
        worker.behave = refuse_with(FULL)
        waiting += wait_for(here, MODEL, "v")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 1)
        assert worker.demands == []
        await end(waiting)
