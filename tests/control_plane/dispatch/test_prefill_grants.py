"""Prefill workers grant what they compute soon, and hear of the prompts that wait for them."""

from __future__ import annotations

import pytest

from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.room_search import Lack
from control_plane.routing.router import Route
from tandem.v1 import types_pb2 as pb
from tests.control_plane.dispatch.test_grants import LIVE_MS, end
from tests.control_plane.dispatch.test_rooms import wait_for
from tests.control_plane.harness import PROMPT, Harness, answer, harness, new_request, tokens_of
from tests.control_plane.scripted_worker import DECODE, MODEL, PREFILL, Behaviour, ScriptedWorker, only_accept, serve
from tests.tandem_worker.kv_harness import until

NUM = len(PROMPT)


def granting(name: str, role: pb.WorkerRole.ValueType, num_tokens: int, behave: Behaviour = serve) -> ScriptedWorker:
    worker = ScriptedWorker(name, role, behave)
    worker.grant = pb.Grant(number=1, num_tokens=num_tokens, num_requests=9, valid_ms=LIVE_MS)
    return worker


async def have_granted(here: Harness, *workers: ScriptedWorker) -> None:
    """Let the gateway know that the workers run requests of others, and wait until it has their grants."""
    for worker in workers:
        here.report(worker, num_running=3)
        await until(lambda life=worker.incarnation: bool(here.links.attachment(life).grant))  # type: ignore[misc, union-attr]


async def test_prefill_workers_hear_of_each_prompt_once_and_decode_workers_of_each_answer() -> None:
    prefill, decode = granting("p", PREFILL, 1000), granting("d", DECODE, 1)
    async with harness(prefill, decode, queue_seconds=60) as here:
        await have_granted(here, prefill, decode)
        waiting = wait_for(here, MODEL, "xyy")
        for worker in (prefill, decode):
            await worker.until(lambda worker: worker.waiting.num_requests == 3)
            assert worker.waiting.num_tokens == 3 * NUM and worker.waiting.first_tokens == NUM
            assert sorted(each.num_requests for each in worker.waiting.accounts) == [1, 2]
        await end(waiting)
        await prefill.until(lambda worker: worker.waiting.num_requests == 0)


async def test_prefill_workers_hear_nothing_of_a_prompt_that_decode_would_compute() -> None:
    prefill, decode = granting("p", PREFILL, 1000), granting("d", DECODE, 1)
    async with harness(prefill, decode, queue_seconds=60, local_prefill="auto") as here:
        await have_granted(here, prefill, decode)
        here.report(prefill, num_running=3, counters={"prompt_tokens_computed": 1.0, "step_seconds": 1.0})
        waiting = wait_for(here, MODEL, "x")
        await decode.until(lambda worker: worker.waiting.num_requests == 1)
        here.report(prefill, num_running=3, counters={"prompt_tokens_computed": 1e6, "step_seconds": 1.0})
        here.dispatcher.queue.release_next(MODEL)
        await prefill.until(lambda worker: worker.waiting.num_requests == 1)
        assert [each.waiting.num_requests for each in prefill.demands if each.HasField("waiting")] == [1]
        await end(waiting)


async def test_a_prompt_is_sent_within_the_grant_of_its_prefill_worker_and_counts_what_is_computed() -> None:
    prefill, decode = granting("p", PREFILL, NUM + 1, only_accept), granting("d", DECODE, 10_000, only_accept)
    async with harness(prefill, decode, queue_seconds=60) as here:
        await have_granted(here, prefill, decode)
        waiting = wait_for(here, MODEL, "xy")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 1)
        for worker in (prefill, decode):
            await worker.until(lambda worker: len(worker.submits) == 1)
        assert [submit.grant_tokens for submit in prefill.submits] == [NUM]
        for _ in range(3):
            here.report(prefill, num_running=3)
        prefill.streams[-1].grant(pb.Grant(number=2, num_tokens=2 * NUM, num_requests=9, valid_ms=LIVE_MS))
        await prefill.until(lambda worker: len(worker.submits) == 2)
        await decode.until(lambda worker: len(worker.submits) == 2)
        await end(waiting)


async def test_a_prompt_goes_to_the_prefill_worker_that_has_granted_it() -> None:
    full, free = granting("p", PREFILL, 0), granting("q", PREFILL, 10 * NUM)
    async with harness(full, free, ScriptedWorker("d"), queue_seconds=60) as here:
        await have_granted(here, full, free)
        stream = await here.dispatcher.submit(new_request())
        assert await tokens_of(stream) == [answer()]
        assert (len(full.submits), len(free.submits)) == (0, 1)
        (call,) = [call for call in stream.state.history.calls if call.is_prefill]
        assert call.grant is not None and (call.grant.num_tokens, call.grant.num_requests) == (10 * NUM, 9)


async def test_the_order_of_accounts_is_that_of_decode_workers() -> None:
    prefill, decode = granting("p", PREFILL, 1000), granting("d", DECODE, 1)
    async with harness(prefill, decode, queue_seconds=60) as here:
        await have_granted(here, prefill, decode)
        waiting = wait_for(here, MODEL, "xy")
        await decode.until(lambda worker: worker.waiting.num_requests == 2)
        counters = here.dispatcher.queue.room(MODEL).counters[0]

        async def told(worker: ScriptedWorker) -> float:
            """Return by how much x is before y once a worker has said that x has used more."""
            turns = [pb.AccountTurn(fairness_key="y"), pb.AccountTurn(fairness_key="x", lead=100.0)]
            worker.streams[-1].grant(pb.Grant(number=2, num_tokens=1, num_requests=1, valid_ms=LIVE_MS, turns=turns))
            await worker.until(lambda worker: any(demand.grant_number == 2 for demand in worker.demands))
            return counters.of("x") - counters.of("y")

        assert await told(prefill) == 0.0
        assert await told(decode) > 0.0
        await end(waiting)


async def test_what_workers_told_is_forgotten_when_they_go_or_when_others_tell_it() -> None:
    turns = [pb.AccountTurn(fairness_key="y"), pb.AccountTurn(fairness_key="x", lead=100.0, num_elsewhere=3)]
    first, second, decode = granting("p", PREFILL, 1000), granting("q", PREFILL, 1000), ScriptedWorker("d")
    for worker in (first, second):
        assert worker.grant is not None, "it grants"
        worker.grant.turns.extend(turns)
    async with harness(first, second, decode, queue_seconds=60) as here:
        await have_granted(here, first, second)
        room = here.dispatcher.queue.room(MODEL)
        assert room._elsewhere.leads() == {0: {"x": 200.0, "y": 0.0}}
        here.registry.deregister(first.worker_id, first.incarnation)
        assert room._elsewhere.leads() == {0: {"x": 100.0, "y": 0.0}}
        await have_granted(here, await here.add(granting("e", DECODE, 1)))
        assert room._elsewhere.leads() == {}, "decode workers tell of all that waits"


@pytest.mark.parametrize(
    ("at_prefill", "at_decode", "lack"),
    [(NUM - 1, NUM, Lack.PREFILL), (NUM - 1, NUM - 1, Lack.PREFILL), (NUM, NUM - 1, Lack.DECODE), (NUM, NUM, None)],
)
async def test_the_half_that_has_not_granted_the_prompt_is_named(
    at_prefill: int, at_decode: int, lack: Lack | None
) -> None:
    prefill, decode = granting("p", PREFILL, at_prefill), granting("d", DECODE, at_decode)
    async with harness(prefill, decode) as here:
        await have_granted(here, prefill, decode)
        request = RoutingRequest(MODEL, NUM, 10)
        route = here.router.choose(request)
        assert (route.prefill_id, route.decode_id) == ("p", "d")
        found = here.dispatcher.rooms.narrowed(route, request, may_offer=True)
        assert found is lack if lack else isinstance(found, Route)


async def test_a_prefill_worker_whose_grant_has_expired_gets_a_few_prompts_by_the_estimate() -> None:
    prefill, decode = granting("p", PREFILL, 0, only_accept), granting("d", DECODE, 10_000, only_accept)
    prefill.grant = pb.Grant(number=1, num_tokens=0, num_requests=0, valid_ms=0)
    async with harness(prefill, decode, queue_seconds=60) as here:
        await have_granted(here, prefill, decode)
        waiting = wait_for(here, MODEL, "uvwxyz")
        await prefill.until(lambda worker: len(worker.submits) == 4)
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 2)
        prefill.streams[-1].grant(pb.Grant(number=2, num_tokens=5 * NUM, num_requests=9, valid_ms=LIVE_MS))
        await prefill.until(lambda worker: len(worker.submits) == 5)
        assert here.dispatcher.queue.num_waiting(MODEL) == 1
        await end(waiting)


async def test_a_prefill_worker_of_the_release_before_gets_what_the_gateway_estimates() -> None:
    prefill, decode = ScriptedWorker("p", PREFILL, only_accept), granting("d", DECODE, 10_000, only_accept)
    async with harness(prefill, decode, queue_seconds=60) as here:
        await have_granted(here, decode)
        waiting = wait_for(here, MODEL, "vwxyz")
        await prefill.until(lambda worker: len(worker.submits) == 5)
        assert prefill.demands == []
        await end(waiting)


async def test_a_prefill_worker_that_drains_or_dies_leaves_its_prompts_to_those_that_grant() -> None:
    first, second = granting("p", PREFILL, 0), granting("q", PREFILL, 0)
    async with harness(first, second, ScriptedWorker("d"), queue_seconds=60) as here:
        await have_granted(here, first, second)
        waiting = wait_for(here, MODEL, "xy")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 2)
        here.report(first, state=pb.WORKER_STATE_DRAINING)
        first.streams[-1].grant(pb.Grant(number=2, num_tokens=1000, num_requests=9, valid_ms=LIVE_MS))
        await first.kill()
        second.streams[-1].grant(pb.Grant(number=2, num_tokens=NUM, num_requests=9, valid_ms=LIVE_MS))
        await until(lambda: any(each.done() for each in waiting))
        third = await here.add(granting("r", PREFILL, NUM))
        for each in waiting:
            assert await tokens_of(await each) == [answer()]  # type: ignore[arg-type]
        assert [len(worker.submits) for worker in (first, second, third)] == [0, 1, 1]
