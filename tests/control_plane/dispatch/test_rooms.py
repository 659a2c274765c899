"""A model that is full or lost delays no other model, and one account fills no room alone."""

from __future__ import annotations

import asyncio

import pytest

from tandem_runtime.errors import Overloaded
from tests.control_plane.harness import FULL, Harness, answer, harness, new_request, tokens_of
from tests.control_plane.scripted_worker import (
    DECODE,
    MODEL,
    PREFILL,
    ScriptedWorker,
    only_accept,
    refuse_with,
    serve,
    silent,
)
from tests.tandem_worker.kv_harness import until


def of_other_model(name: str = "b") -> ScriptedWorker:
    worker = ScriptedWorker(name)
    worker.model_id = "other"
    return worker


def wait_for(here: Harness, model_id: str, accounts: str) -> list[asyncio.Task[object]]:
    """Begin a request of each account."""
    return [
        asyncio.create_task(
            here.dispatcher.submit(new_request(request_id=f"{model_id}-{i}", model_id=model_id, account=account))
        )
        for i, account in enumerate(accounts)
    ]


async def end(waiting: list[asyncio.Task[object]]) -> None:
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_an_idle_models_request_is_submitted_at_once_while_a_full_models_wait() -> None:
    """Finding 4: B's worker got no Submit until A's requests had given up."""
    full, idle = ScriptedWorker("a", behave=refuse_with(FULL)), of_other_model()
    async with harness(full, idle, queue_seconds=60) as here:
        waiting = wait_for(here, MODEL, "xyz")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 3)
        stream = await here.dispatcher.submit(new_request(request_id="b", model_id="other"))
        assert await tokens_of(stream) == [answer()]
        assert len(idle.submits) == 1
        assert here.dispatcher.queue.num_by_model() == {MODEL: 3}
        full.behave = serve
        here.report(full)
        for each in waiting:
            assert await tokens_of(await each) == [answer()]  # type: ignore[arg-type]


async def test_a_room_that_is_full_refuses_its_own_model_only() -> None:
    full, idle = ScriptedWorker("a", behave=refuse_with(FULL)), of_other_model()
    async with harness(full, idle, queue_seconds=60) as here:
        waiting = wait_for(here, MODEL, "stuvwxyz")  # 8 may wait
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 8)
        with pytest.raises(Overloaded, match=f"8 requests wait for {MODEL} already"):
            await here.dispatcher.submit(new_request(request_id="late", account="late"))
        assert await tokens_of(await here.dispatcher.submit(new_request(model_id="other"))) == [answer()]
        await end(waiting)


async def test_one_account_leaves_half_of_a_room_to_others() -> None:
    full = ScriptedWorker("a", behave=refuse_with(FULL))
    async with harness(full, queue_seconds=60) as here:
        waiting = wait_for(here, MODEL, "xxxx")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 4)
        with pytest.raises(Overloaded, match="4 requests of your account wait"):
            await here.dispatcher.submit(new_request(request_id="fifth", account="x"))
        waiting += wait_for(here, MODEL, "yyyy")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 8)
        await end(waiting)


async def test_a_lost_model_delays_no_other() -> None:
    """Its requests wait 15 s for its only worker to be back."""
    lost, idle = ScriptedWorker("a"), of_other_model()
    async with harness(lost, idle, queue_seconds=60) as here:
        worker = next(worker for worker in here.registry.workers(DECODE) if worker.worker_id == "a")
        here.registry.deregister(worker.worker_id, worker.incarnation)
        waiting = wait_for(here, MODEL, "xyz")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 3)
        assert await tokens_of(await here.dispatcher.submit(new_request(model_id="other"))) == [answer()]
        assert here.dispatcher.queue.num_by_model() == {MODEL: 3}
        await end(waiting)


async def test_a_probe_waits_nowhere_and_leaves_why_it_was_not_handed_over() -> None:
    full_prefill, decode = ScriptedWorker("p", PREFILL, refuse_with(FULL)), ScriptedWorker("d")
    async with harness(full_prefill, decode, queue_seconds=60) as here:
        probe = {"is_probe": True, "reject_if_busy": True}
        assert await tokens_of(await here.dispatcher.submit(new_request(**probe))) == [answer()]
        assert here.proofs.refusal(MODEL) == FULL.message
        assert await tokens_of(await here.dispatcher.submit(new_request(request_id="users"))) == [answer()]
        assert here.proofs.refusal(MODEL) == "", "what users' requests meet says nothing of a probe"
        decode.behave = refuse_with(FULL)
        with pytest.raises(Overloaded, match="12 KV blocks"):
            await here.dispatcher.submit(new_request(request_id="another", **probe))
        assert len(here.dispatcher.queue) == 0


async def test_the_end_of_a_request_releases_its_own_models_room() -> None:
    full, other = ScriptedWorker("a", behave=only_accept), of_other_model()
    async with harness(full, other, queue_seconds=60) as here:
        running = await here.dispatcher.submit(new_request(request_id="running"))
        full.behave = refuse_with(FULL)
        waiting = wait_for(here, MODEL, "x")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 1)
        full.behave = serve
        await running.aclose()
        assert await tokens_of(await waiting[0]) == [answer()]  # type: ignore[arg-type]


async def test_all_that_wait_are_sent_as_soon_as_there_is_room_and_none_waits_for_the_others_answers() -> None:
    """Finding 22: each of them waited until the worker had answered the one before it."""
    worker = ScriptedWorker("a", behave=refuse_with(FULL))
    async with harness(worker, queue_seconds=60, accept_seconds=30) as here:
        waiting = wait_for(here, MODEL, "uvwxyz")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 6)
        num_refused = len(worker.submits)
        worker.behave = silent
        here.report(worker)
        await worker.until(lambda worker: len(worker.submits) == num_refused + 6)
        await end(waiting)


async def test_a_request_that_waits_is_sent_again_to_a_worker_that_may_have_room_and_to_no_other() -> None:
    """Finding 10: it was sent to every worker, four times a second."""
    workers = [ScriptedWorker(name, behave=refuse_with(FULL)) for name in "abcde"]
    async with harness(*workers, queue_seconds=60) as here:
        waiting = wait_for(here, MODEL, "x")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 1)
        assert [len(worker.submits) for worker in workers] == [1] * 5
        here.report(workers[3])
        await workers[3].until(lambda worker: len(worker.submits) == 2)
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 1)
        assert [len(worker.submits) for worker in workers] == [1, 1, 1, 2, 1]
        workers[4].behave = serve
        here.report(workers[4])
        assert await tokens_of(await waiting[0]) == [answer()]  # type: ignore[arg-type]


async def test_a_worker_whose_seats_are_taken_is_sent_nothing_until_one_is_free() -> None:
    worker = ScriptedWorker("a", behave=only_accept)
    worker.max_num_seqs = 1
    async with harness(worker, queue_seconds=60) as here:
        running = [await here.dispatcher.submit(new_request(request_id=f"running-{i}")) for i in range(2)]
        waiting = wait_for(here, MODEL, "x")  # one runs, and one may queue there
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 1)
        assert len(worker.submits) == 2
        worker.behave = serve
        await running[0].aclose()
        assert await tokens_of(await waiting[0]) == [answer()]  # type: ignore[arg-type]
        await running[1].aclose()


async def test_accounts_take_turns_and_a_lower_class_comes_last() -> None:
    worker = ScriptedWorker("a", behave=only_accept)
    worker.max_num_seqs = 1
    async with harness(worker, queue_seconds=60) as here:
        running = [
            await here.dispatcher.submit(new_request(request_id=f"running-{i}", account="first")) for i in range(2)
        ]
        later = {}
        for name, account, priority in (("b", "batch", -1), ("g", "greedy", 0), ("h", "greedy", 0), ("s", "small", 0)):
            request = new_request(request_id=name, account=account, priority=priority)
            later[name] = asyncio.create_task(here.dispatcher.submit(request))
            num = len(later)
            await until(lambda num=num: here.dispatcher.queue.num_waiting(MODEL) == num)  # type: ignore[misc]
        worker.behave = serve
        await running[0].aclose()
        await until(lambda: len(worker.submits) > 2)  # two turns at once would both be of the account that is next
        await running[1].aclose()
        for submitted in later.values():
            assert await tokens_of(await submitted) == [answer()]
        order = [submit.request_id.partition("-")[0] for submit in worker.submits[2:]]
        assert order == ["g", "s", "h", "b"]
        assert [submit.priority for submit in worker.submits[2:]] == [0, 0, 0, -1]


async def test_the_length_of_a_probes_answer_tells_nothing_of_others() -> None:
    async with harness(ScriptedWorker("a", behave=serve)) as here:
        prices = here.dispatcher.queue.room(MODEL).prices
        assumed = prices.answer_tokens
        await tokens_of(await here.dispatcher.submit(new_request(request_id="probe", is_probe=True)))
        assert prices.answer_tokens == assumed
        tokens = await tokens_of(await here.dispatcher.submit(new_request(request_id="other")))
        await until(lambda: prices.answer_tokens == len(tokens[0]))


async def test_a_prompt_goes_to_another_prefill_worker_than_a_full_one_unless_that_takes_longer() -> None:
    soon, slow = ScriptedWorker("p", PREFILL), ScriptedWorker("q", PREFILL)
    async with harness(soon, slow, ScriptedWorker("d"), queue_seconds=60) as here:
        here.report(soon, counters={"prompt_tokens_computed": 5e9, "step_seconds": 1e6})
        here.report(slow, counters={"prompt_tokens_computed": 35e6, "step_seconds": 1e6})
        queued = here.router.in_flight.add(soon.incarnation, num_prefill_tokens=5500)  # 1.1 s; the other: 1.15 s
        assert await tokens_of(await here.dispatcher.submit(new_request())) == [answer()]
        assert (len(soon.submits), len(slow.submits)) == (0, 1)
        here.report(slow, counters={"prompt_tokens_computed": 25e6, "step_seconds": 1e6})  # 1.6 s
        waiting = wait_for(here, MODEL, "x")
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 1)
        queued.remove()
        here.dispatcher.queue.release_next(MODEL)  # as the end of a call does
        assert await tokens_of(await waiting[0]) == [answer()]  # type: ignore[arg-type]
        assert (len(soon.submits), len(slow.submits)) == (1, 1)
