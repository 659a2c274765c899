"""Every request ends with its tokens or an error and leaves nothing behind, whatever its workers do."""

from __future__ import annotations

import asyncio
import time

import pytest

from control_plane.dispatch.request_state import GRACE_SECONDS
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import ContextTooLong, DeadlineExceeded, Draining, InvalidRequest, Overloaded, Unavailable
from tests.control_plane.harness import FULL, PROMPT, answer, harness, new_request, tokens_of
from tests.control_plane.scripted_worker import (
    DECODE,
    MODEL,
    PREFILL,
    AttachStream,
    ScriptedWorker,
    lose_after,
    only_accept,
    refuse_with,
    serve,
    silent,
)
from tests.tandem_worker.kv_harness import until


async def test_tokens_come_once_though_prefill_and_decode_both_send_the_first() -> None:
    async with harness(ScriptedWorker("p", PREFILL), ScriptedWorker("d")) as here:
        stream = await here.dispatcher.submit(new_request(num_choices=2))
        assert await tokens_of(stream) == [answer(), answer()]
        assert stream.usage.num_completion_tokens == 10
        assert stream.usage.num_prompt_tokens == len(PROMPT)
        assert here.kv.calls == []  # the readers release; nothing is left for the gateway to do


async def test_a_full_worker_passes_the_request_to_the_next() -> None:
    full, free = ScriptedWorker("a", behave=refuse_with(FULL)), ScriptedWorker("b")
    async with harness(full, free) as here:
        assert await tokens_of(await here.dispatcher.submit(new_request())) == [answer()]
        assert len(full.submits) == len(free.submits) == 1


async def test_if_all_are_full_the_client_is_told_to_come_again_and_why() -> None:
    full = [ScriptedWorker(name, behave=refuse_with(FULL)) for name in "ab"]
    async with harness(*full, ScriptedWorker("c", behave=refuse_with(Draining("leaving")))) as here:
        with pytest.raises(Overloaded, match="12 KV blocks") as refused:
            await here.dispatcher.submit(new_request())
        assert refused.value.http_status == 429
        assert refused.value.retry_after_seconds is not None and 0.5 <= refused.value.retry_after_seconds <= 1.5


async def test_a_request_waits_at_the_door_until_somebody_leaves() -> None:
    worker = ScriptedWorker("d", behave=only_accept)
    async with harness(worker, queue_seconds=10) as here:
        first = await here.dispatcher.submit(new_request(request_id="first"))
        worker.behave = refuse_with(FULL)
        second = asyncio.create_task(here.dispatcher.submit(new_request(request_id="second")))
        await worker.until(lambda worker: len(worker.submits) == 2)
        worker.behave = serve
        await first.aclose()
        assert await tokens_of(await second) == [answer()]


async def test_a_request_waits_for_the_only_decode_worker_to_be_back() -> None:
    async with harness(ScriptedWorker("d"), queue_seconds=10) as here:
        (worker,) = here.registry.workers(DECODE)
        draining = pb.LoadReport(state=pb.WORKER_STATE_DRAINING)
        here.registry.register(worker.info, draining)
        waiting = asyncio.create_task(here.dispatcher.submit(new_request()))
        await until(lambda: len(here.dispatcher.queue) == 1)
        here.registry.register(worker.info, worker.load)
        assert await tokens_of(await waiting) == [answer()]
        here.registry.register(worker.info, draining)
        with pytest.raises(Unavailable, match="no decode worker"):
            await here.dispatcher.submit(new_request(request_id="now", reject_if_busy=True))
        here.registry.register(worker.info, worker.load)


async def test_a_request_waits_though_nobody_serves_its_model_any_more() -> None:
    """Workers served the model when the request came. All have died, and one may soon be back."""
    async with harness(ScriptedWorker("d"), queue_seconds=10) as here:
        (worker,) = here.registry.workers(DECODE)
        here.registry.deregister(worker.worker_id, worker.incarnation)
        waiting = asyncio.create_task(here.dispatcher.submit(new_request()))
        await until(lambda: len(here.dispatcher.queue) == 1)
        here.registry.register(worker.info, worker.load)
        assert await tokens_of(await waiting) == [answer()]


async def test_a_gateway_that_stops_ends_what_runs_and_waits_and_refuses_what_comes() -> None:
    worker = ScriptedWorker("d", behave=only_accept)
    async with harness(worker, queue_seconds=60) as here:
        running = await here.dispatcher.submit(new_request(request_id="running"))
        worker.behave = refuse_with(FULL)
        waiting = asyncio.create_task(here.dispatcher.submit(new_request(request_id="waiting")))
        await until(lambda: len(here.dispatcher.queue) == 1)
        assert here.dispatcher.num_requests == 2
        here.dispatcher.stop(lambda: Draining("the gateway stops"))
        errors: list[Draining] = []
        for ended in (tokens_of(running), waiting, here.dispatcher.submit(new_request(request_id="late"))):
            with pytest.raises(Draining, match="the gateway stops") as raised:
                await asyncio.wait_for(ended, 10)
            errors.append(raised.value)
        assert len(set(map(id, errors))) == 3, "what is noted on one error is not another request's"
        assert here.dispatcher.num_requests == 0


async def test_what_a_second_worker_says_too_is_said_at_once() -> None:
    workers = [ScriptedWorker(name, behave=refuse_with(InvalidRequest("top_k is wrong"))) for name in "abc"]
    async with harness(*workers) as here:
        with pytest.raises(InvalidRequest, match="top_k"):
            await here.dispatcher.submit(new_request())
        assert sum(len(worker.submits) for worker in workers) == 2


async def test_a_silent_worker_is_cancelled_and_another_asked() -> None:
    mute, good = ScriptedWorker("a", behave=silent), ScriptedWorker("b")
    async with harness(mute, good) as here:
        assert await tokens_of(await here.dispatcher.submit(new_request())) == [answer()]
        await mute.until(lambda mute: len(mute.cancels) == 1)


async def test_nobody_waits_for_a_silent_worker_beyond_the_deadline() -> None:
    mute = ScriptedWorker("a", behave=silent)
    async with harness(mute, ScriptedWorker("b")) as here:
        with pytest.raises(DeadlineExceeded):
            await here.dispatcher.submit(new_request(deadline=time.monotonic() - GRACE_SECONDS))
        await mute.until(lambda mute: len(mute.cancels) == 1)


async def test_a_silent_prefill_worker_costs_an_attempt_and_no_ledger_is_awaited_of_it() -> None:
    async def wait_for_blocks(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        await (only_accept if submit.HasField("handle") else serve)(worker, attach, submit)

    mute, decode = ScriptedWorker("p", PREFILL, silent), ScriptedWorker("d", behave=wait_for_blocks)
    async with harness(mute, decode) as here:
        stream = await here.dispatcher.submit(new_request())
        started = time.monotonic()
        assert await tokens_of(stream) == [answer()]
        assert time.monotonic() - started < 1.0
        assert [(submit.attempt, submit.HasField("handle")) for submit in decode.submits] == [(0, True), (1, False)]
        assert "release_all" in here.kv.calls


async def test_when_one_choice_is_refused_by_all_the_others_are_cancelled() -> None:
    async def first_two_only(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        if submit.choice_index < 2:
            attach.accept(submit)
        else:
            attach.refuse(submit, FULL)

    worker = ScriptedWorker("d", behave=first_two_only)
    async with harness(worker) as here:
        with pytest.raises(Overloaded):
            await here.dispatcher.submit(new_request(num_choices=3))
        await worker.until(lambda worker: {cancel.request_id for cancel in worker.cancels} == {"r-0", "r-1"})


async def test_the_choices_of_a_request_wait_as_one_and_are_offered_together_again() -> None:
    async def first_only(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        if submit.choice_index:
            attach.refuse(submit, FULL)
        else:
            attach.accept(submit)

    worker = ScriptedWorker("d", behave=first_only)
    async with harness(worker, queue_seconds=10) as here:
        waiting = asyncio.create_task(here.dispatcher.submit(new_request(num_choices=3)))
        await worker.until(lambda worker: len(worker.submits) == 6)
        assert len(here.dispatcher.queue) <= 1
        worker.behave = serve
        assert await tokens_of(await waiting) == [answer(), answer(), answer()]
        attempts = [submit.attempt for submit in worker.submits[::3]]
        assert attempts == sorted(set(attempts)), "each offer has an attempt of its own"
        offers = [(submit.attempt, submit.choice_index) for submit in worker.submits]
        assert offers == [(attempt, index) for attempt in attempts for index in range(3)]


async def test_a_caller_cancelled_while_workers_decide_leaves_nothing_behind() -> None:
    prefill, decode = ScriptedWorker("p", PREFILL, silent), ScriptedWorker("d", behave=silent)
    async with harness(prefill, decode) as here:
        submitting = asyncio.create_task(here.dispatcher.submit(new_request()))
        await decode.until(lambda decode: len(decode.submits) == 1)
        submitting.cancel()
        await asyncio.gather(submitting, return_exceptions=True)
        await decode.until(lambda decode: len(decode.cancels) == 1)
        await prefill.until(lambda prefill: len(prefill.cancels) == len(prefill.submits))


async def test_workers_report_what_they_computed_for_a_client_that_left_before_its_first_token() -> None:
    """Each of them counts once: two workers that computed the same tokens did so for our sake."""
    prefill, decode = ScriptedWorker("p", PREFILL, only_accept), ScriptedWorker("d", behave=only_accept)
    prefill.num_computed_tokens, decode.num_computed_tokens = 32, 16
    async with harness(prefill, decode) as here:
        stream = await here.dispatcher.submit(new_request())
        await stream.aclose()
        assert await asyncio.wait_for(stream.num_unfinished_tokens(), 5) == 32


async def test_a_worker_that_is_lost_before_it_reports_costs_whoever_left_nothing() -> None:
    decode = ScriptedWorker("d", behave=only_accept)
    async with harness(decode) as here:
        stream = await here.dispatcher.submit(new_request())
        await stream.aclose()
        await decode.until(lambda decode: len(decode.cancels) == 1)
        decode.streams[0].events.put_nowait(None)
        assert await asyncio.wait_for(stream.num_unfinished_tokens(), 5) == 0


async def test_the_ledger_of_a_prompt_that_was_done_when_its_client_left_counts() -> None:
    """Prefill's first token was on its way; no client has it."""

    async def first_token_after_the_cancel(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        await worker.until(lambda worker: len(worker.cancels) == 1)
        await serve(worker, attach, submit)

    prefill = ScriptedWorker("p", PREFILL, first_token_after_the_cancel)
    decode = ScriptedWorker("d", behave=only_accept)
    decode.num_computed_tokens = 0
    async with harness(prefill, decode) as here:
        stream = await here.dispatcher.submit(new_request())
        await stream.aclose()
        assert await asyncio.wait_for(stream.num_unfinished_tokens(), 5) == len(PROMPT)


async def test_at_its_deadline_a_request_has_what_its_worker_had_computed() -> None:
    async def expire(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        attach.fail(submit, DeadlineExceeded("its deadline passed"), pb.PhaseLedger(num_computed_tokens=24))

    async with harness(ScriptedWorker("d", behave=expire)) as here:
        stream = await here.dispatcher.submit(new_request())
        with pytest.raises(DeadlineExceeded):
            await tokens_of(stream)
        assert await asyncio.wait_for(stream.num_unfinished_tokens(), 5) == 24


async def test_a_prefill_worker_lost_after_it_accepted_lets_decode_compute() -> None:
    async def wait_for_recompute(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        await aborted.wait()
        await serve(worker, attach, submit)

    aborted = asyncio.Event()
    async with harness(
        ScriptedWorker("p", PREFILL, lose_after(0)), ScriptedWorker("d", behave=wait_for_recompute)
    ) as w:
        stream = await w.dispatcher.submit(new_request())
        await until(lambda: w.kv.calls == ["abort"])
        aborted.set()
        assert await tokens_of(stream) == [answer()]


async def test_an_answer_that_prefill_finished_needs_no_second_attempt() -> None:
    async def end_at_once(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        done = {"finish_reason": pb.FINISH_REASON_STOP, "ledger": pb.PhaseLedger(num_computed_tokens=40)}
        attach.tokens(submit, len(PROMPT), answer(1), **done)

    async def refuse_late(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        await finished.wait()
        attach.refuse(submit, FULL)

    finished = asyncio.Event()
    decode = ScriptedWorker("d", behave=refuse_late)
    async with harness(ScriptedWorker("p", PREFILL, end_at_once), decode) as here:
        submitting = asyncio.create_task(here.dispatcher.submit(new_request()))
        await decode.until(lambda decode: len(decode.submits) == 1)
        await until(lambda: here.router.in_flight.prefill_tokens.total() == 0)
        finished.set()
        assert await tokens_of(await submitting) == [answer(1)]


async def test_who_will_not_wait_is_refused_while_all_are_busy() -> None:
    worker = ScriptedWorker("d")
    async with harness(worker, queue_seconds=10) as here:
        here.registry.register(worker.info(), worker.load(num_waiting=1))
        with pytest.raises(Overloaded, match="asks not to wait"):
            await here.dispatcher.submit(new_request(reject_if_busy=True))
        assert await tokens_of(await here.dispatcher.submit(new_request())) == [answer()]


async def test_a_request_that_no_pool_could_ever_hold_does_not_wait() -> None:
    worker = ScriptedWorker("d")
    worker.pool.num_total_blocks = 3
    async with harness(worker, queue_seconds=10) as here:
        with pytest.raises(ContextTooLong, match="the largest has 48"):
            await here.dispatcher.submit(new_request(max_tokens=20))


async def test_a_session_stays_with_its_workers() -> None:
    async with harness(*(ScriptedWorker(name) for name in "abc")) as here:
        spread = [
            await here.dispatcher.submit(new_request(request_id=str(i), session_affinity="other")) for i in range(1)
        ]
        first = await here.dispatcher.submit(new_request(request_id="one", session_affinity="mine"))
        for stream in (*spread, first):
            await tokens_of(stream)
        again = await here.dispatcher.submit(new_request(request_id="two", session_affinity="mine"))
        await tokens_of(again)
        assert again.route["decode"] == first.route["decode"]


async def test_a_finished_request_proves_its_model() -> None:
    async with harness(ScriptedWorker("d")) as here:
        await (await here.dispatcher.submit(new_request())).aclose()
        assert list(here.proofs) == []
        await tokens_of(await here.dispatcher.submit(new_request(request_id="s")))
        assert list(here.proofs) == [(MODEL, False)]  # there is no prefill worker here
