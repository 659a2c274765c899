"""Does every request end in its tokens or in an error, and leave nothing behind, whatever its workers do?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from control_plane.dispatcher import Dispatcher
from control_plane.flight import Flight
from control_plane.generation import TokenRequest
from control_plane.kv_clients import KvClients
from control_plane.links import LinkPool
from control_plane.registry import WorkerRegistry
from control_plane.router import Router
from engine.scheduling.sampling_params import SamplingParams
from runtime.errors import ContextTooLong, Draining, InternalError, InvalidRequest, Overloaded, TandemError, Unavailable
from tandem.v1 import types_pb2 as pb
from tests.control_plane.scripted_worker import (
    DECODE,
    FINGERPRINT,
    MODEL,
    PREFILL,
    Say,
    ScriptedWorker,
    fail_after,
    kv_service,
    lose_after,
    only_accept,
    refuse_with,
    serve,
    silent,
    token_at,
)
from tests.worker.kv_world import until

FULL = Overloaded("12 KV blocks are needed, 3 are available", retry_after_seconds=1.0)
PROMPT = tuple(range(40))


class RecordedKv:
    """The gateway's KV clients, which only remember what they were asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def release_all(self, handle: pb.KvHandle) -> None:
        self.calls.append("release_all")

    async def release(self, handle: pb.KvHandle, reader_id: str) -> None:
        self.calls.append(f"release {reader_id}")

    async def abort(self, handle: pb.KvHandle, reason: TandemError) -> None:
        self.calls.append("abort")


class World:
    def __init__(self, queue_seconds: float) -> None:
        self.registry = WorkerRegistry(3.0, 5.0)
        self.links = LinkPool(self.registry, "gateway", "gateway-life")
        self.router = Router(self.registry)
        self.kv = RecordedKv()
        self.dispatcher = Dispatcher(
            self.registry,
            self.links,
            self.router,
            self,
            cast(KvClients, self.kv),
            b"s" * 32,
            accept_seconds=0.3,
            queue_seconds=queue_seconds,
            max_waiting=8,
        )
        self.workers: list[ScriptedWorker] = []

    def card(self, name: str) -> pb.ModelCard:
        return pb.ModelCard(
            model_id=MODEL, fingerprint=pb.Fingerprint(digest=FINGERPRINT), block_size=16, context_length=512
        )

    async def add(self, worker: ScriptedWorker) -> ScriptedWorker:
        self.workers.append(await worker.start())
        return worker.register(self.registry)

    def nothing_is_left(self) -> bool:
        links = [self.links.get(worker) for worker in self.registry.workers(DECODE)]
        links += [self.links.get(worker) for worker in self.registry.workers(PREFILL)]
        return self.router.in_flight.total() == 0 and not any(link.num_requests for link in links)


@asynccontextmanager
async def world(*workers: ScriptedWorker, queue_seconds: float = 0.0) -> AsyncIterator[World]:
    """A gateway's inside, with these workers and a KV service; afterwards nothing may be in flight."""
    here = World(queue_seconds)
    here.registry.register(kv_service(), pb.LoadReport(state=pb.WORKER_STATE_READY))
    for worker in workers:
        await here.add(worker)
    try:
        yield here
        assert here.nothing_is_left()
    finally:
        await here.dispatcher.close()
        await here.links.close()
        for worker in here.workers:
            await worker.kill()


def ask(max_tokens: int = 5, num_choices: int = 1, **fields: Any) -> TokenRequest:
    values: dict[str, Any] = {
        "request_id": "r",
        "account": "me",
        "model_id": MODEL,
        "token_ids": PROMPT,
        "sampling": SamplingParams(max_tokens=max_tokens, temperature=0.0),
        "choice_seeds": tuple(range(num_choices)),
        "deadline": time.time() + 20,
    }
    return TokenRequest(**{**values, **fields})


def answer(max_tokens: int = 5) -> list[int]:
    return [token_at(len(PROMPT) + i) for i in range(max_tokens)]


async def tokens_of(flight: Flight) -> list[list[int]]:
    choices: list[list[int]] = [[] for _ in flight.choices]
    async for delta in flight:
        choices[delta.choice_index].extend(delta.token_ids)
    return choices


async def test_tokens_come_once_though_prefill_and_decode_both_send_the_first() -> None:
    async with world(ScriptedWorker("p", PREFILL), ScriptedWorker("d")) as here:
        flight = await here.dispatcher.submit(ask(num_choices=2))
        assert await tokens_of(flight) == [answer(), answer()]
        assert flight.usage.num_completion_tokens == 10
        assert flight.usage.num_prompt_tokens == len(PROMPT)
        assert here.kv.calls == []  # the readers release; nothing is left for the gateway to do


async def test_a_full_worker_passes_the_request_to_the_next() -> None:
    full, free = ScriptedWorker("a", behave=refuse_with(FULL)), ScriptedWorker("b")
    async with world(full, free) as here:
        assert await tokens_of(await here.dispatcher.submit(ask())) == [answer()]
        assert len(full.submits) == len(free.submits) == 1


async def test_if_all_are_full_the_client_is_told_to_come_again_and_why() -> None:
    full = [ScriptedWorker(name, behave=refuse_with(FULL)) for name in "ab"]
    async with world(*full, ScriptedWorker("c", behave=refuse_with(Draining("leaving")))) as here:
        with pytest.raises(Overloaded, match="12 KV blocks") as refused:
            await here.dispatcher.submit(ask())
        assert (refused.value.http_status, refused.value.retry_after_seconds) == (429, 1.0)


async def test_a_request_waits_at_the_door_until_somebody_leaves() -> None:
    worker = ScriptedWorker("d", behave=only_accept)
    async with world(worker, queue_seconds=10) as here:
        first = await here.dispatcher.submit(ask(request_id="first"))
        worker.behave = refuse_with(FULL)
        second = asyncio.create_task(here.dispatcher.submit(ask(request_id="second")))
        await worker.until(lambda worker: len(worker.submits) == 2)
        worker.behave = serve
        await first.aclose()
        assert await tokens_of(await second) == [answer()]


async def test_what_every_worker_would_say_is_said_at_once() -> None:
    workers = [ScriptedWorker(name, behave=refuse_with(InvalidRequest("top_k is wrong"))) for name in "ab"]
    async with world(*workers) as here:
        with pytest.raises(InvalidRequest, match="top_k"):
            await here.dispatcher.submit(ask())
        assert sum(len(worker.submits) for worker in workers) == 1


async def test_a_silent_worker_is_cancelled_and_another_asked() -> None:
    mute, good = ScriptedWorker("a", behave=silent), ScriptedWorker("b")
    async with world(mute, good) as here:
        assert await tokens_of(await here.dispatcher.submit(ask())) == [answer()]
        await mute.until(lambda mute: len(mute.cancels) == 1)


async def test_a_silent_prefill_worker_costs_an_attempt_and_no_ledger_is_awaited_of_it() -> None:
    async def wait_for_blocks(worker: ScriptedWorker, say: Say, submit: pb.Submit) -> None:
        await (only_accept if submit.HasField("handle") else serve)(worker, say, submit)

    mute, decode = ScriptedWorker("p", PREFILL, silent), ScriptedWorker("d", behave=wait_for_blocks)
    async with world(mute, decode) as here:
        flight = await here.dispatcher.submit(ask())
        started = time.monotonic()
        assert await tokens_of(flight) == [answer()]
        assert time.monotonic() - started < 1.0
        assert [(submit.attempt, submit.HasField("handle")) for submit in decode.submits] == [(0, True), (1, False)]
        assert "release_all" in here.kv.calls


async def test_when_one_choice_is_refused_by_all_the_others_are_cancelled() -> None:
    async def first_two_only(worker: ScriptedWorker, say: Say, submit: pb.Submit) -> None:
        if submit.choice_index < 2:
            say.accept(submit)
        else:
            say.refuse(submit, FULL)

    worker = ScriptedWorker("d", behave=first_two_only)
    async with world(worker) as here:
        with pytest.raises(Overloaded):
            await here.dispatcher.submit(ask(num_choices=3))
        await worker.until(lambda worker: {cancel.request_id for cancel in worker.cancels} == {"r-0", "r-1"})


async def test_a_lost_decode_worker_costs_no_token() -> None:
    dying, heir = ScriptedWorker("a", behave=lose_after(3)), ScriptedWorker("b")
    async with world(ScriptedWorker("p", PREFILL), dying, heir) as here:
        assert await tokens_of(await here.dispatcher.submit(ask())) == [answer()]
        (moved,) = heir.submits
        assert list(moved.token_ids) == [*PROMPT, *answer(3)]
        assert moved.num_prompt_tokens == len(PROMPT) and not moved.HasField("handle")
        assert "release r-0" in here.kv.calls


async def test_every_one_of_many_choices_survives_its_worker() -> None:
    dying, heir = ScriptedWorker("a", behave=lose_after(2)), ScriptedWorker("b")
    async with world(dying, heir, queue_seconds=5) as here:
        assert await tokens_of(await here.dispatcher.submit(ask(num_choices=6))) == [answer()] * 6


async def test_a_stream_pauses_until_its_only_worker_is_back() -> None:
    first = ScriptedWorker("d", behave=lose_after(2))
    async with world(first, queue_seconds=10) as here:
        deltas = aiter(await here.dispatcher.submit(ask()))
        assert (await anext(deltas)).token_ids == tuple(answer(2))
        await here.add(ScriptedWorker("d", life=1))
        assert [token async for delta in deltas for token in delta.token_ids] == answer()[2:]


async def test_a_stream_pauses_while_the_worker_it_moves_to_is_full() -> None:
    dying, heir = ScriptedWorker("a", behave=lose_after(2)), ScriptedWorker("b", behave=refuse_with(FULL))
    async with world(dying, heir, queue_seconds=10) as here:
        flight = asyncio.create_task(tokens_of(await here.dispatcher.submit(ask())))
        await heir.until(lambda heir: len(heir.submits) >= 1)
        heir.behave = serve
        assert await flight == [answer()]


async def test_a_stream_that_cannot_go_on_ends_in_the_error_that_stopped_it() -> None:
    async with world(ScriptedWorker("d", behave=fail_after(2, InternalError("out of luck")))) as here:
        flight = await here.dispatcher.submit(ask())
        with pytest.raises(InternalError, match="out of luck"):
            await tokens_of(flight)


async def test_a_client_that_leaves_while_its_stream_moves_leaves_nothing_behind() -> None:
    dying, mute = ScriptedWorker("a", behave=lose_after(2)), ScriptedWorker("b", behave=silent)
    async with world(dying, mute, queue_seconds=10) as here:
        flight = await here.dispatcher.submit(ask())
        await mute.until(lambda mute: len(mute.submits) == 1)
        await flight.aclose()
        await mute.until(lambda mute: len(mute.cancels) == 1)
        await asyncio.gather(*here.dispatcher.background, return_exceptions=True)
        assert len(mute.submits) == 1


async def test_a_caller_cancelled_while_workers_decide_leaves_nothing_behind() -> None:
    prefill, decode = ScriptedWorker("p", PREFILL, silent), ScriptedWorker("d", behave=silent)
    async with world(prefill, decode) as here:
        submitting = asyncio.create_task(here.dispatcher.submit(ask()))
        await decode.until(lambda decode: len(decode.submits) == 1)
        submitting.cancel()
        await asyncio.gather(submitting, return_exceptions=True)
        await decode.until(lambda decode: len(decode.cancels) == 1)
        await prefill.until(lambda prefill: len(prefill.cancels) == len(prefill.submits))


async def test_a_prefill_worker_lost_after_it_accepted_lets_decode_compute() -> None:
    async def wait_for_recompute(worker: ScriptedWorker, say: Say, submit: pb.Submit) -> None:
        say.accept(submit)
        await aborted.wait()
        await serve(worker, say, submit)

    aborted = asyncio.Event()
    async with world(ScriptedWorker("p", PREFILL, lose_after(0)), ScriptedWorker("d", behave=wait_for_recompute)) as w:
        flight = await w.dispatcher.submit(ask())
        await asyncio.gather(*w.dispatcher.background)
        assert w.kv.calls == ["abort"]
        aborted.set()
        assert await tokens_of(flight) == [answer()]


async def test_an_answer_that_prefill_finished_needs_no_second_attempt() -> None:
    async def end_at_once(worker: ScriptedWorker, say: Say, submit: pb.Submit) -> None:
        say.accept(submit)
        done = {"finish_reason": pb.FINISH_REASON_STOP, "ledger": pb.PhaseLedger(num_computed_tokens=40)}
        say.tokens(submit, len(PROMPT), answer(1), **done)

    async def refuse_late(worker: ScriptedWorker, say: Say, submit: pb.Submit) -> None:
        await finished.wait()
        say.refuse(submit, FULL)

    finished = asyncio.Event()
    decode = ScriptedWorker("d", behave=refuse_late)
    async with world(ScriptedWorker("p", PREFILL, end_at_once), decode) as here:
        submitting = asyncio.create_task(here.dispatcher.submit(ask()))
        await decode.until(lambda decode: len(decode.submits) == 1)
        await until(lambda: here.router.in_flight.prefill_tokens.total() == 0)
        finished.set()
        assert await tokens_of(await submitting) == [answer(1)]


async def test_a_worker_that_contradicts_the_tokens_delivered_goes_on_from_those() -> None:
    """Prefill's token one was delivered; decode, which had to compute the prompt itself, finds another."""

    async def contradict(worker: ScriptedWorker, say: Say, submit: pb.Submit) -> None:
        say.accept(submit)
        await asyncio.gather(first_came.wait())
        worker.behave = serve
        say.tokens(submit, len(PROMPT), [7, 8])

    first_came = asyncio.Event()
    decode = ScriptedWorker("d", behave=contradict)
    async with world(ScriptedWorker("p", PREFILL), decode, queue_seconds=5) as here:
        deltas = aiter(await here.dispatcher.submit(ask()))
        assert (await anext(deltas)).token_ids == tuple(answer(1))
        first_came.set()
        assert [token async for delta in deltas for token in delta.token_ids] == answer()[1:]
        assert list(decode.submits[-1].token_ids) == [*PROMPT, *answer(1)]


async def test_who_will_not_wait_is_refused_while_all_are_busy() -> None:
    worker = ScriptedWorker("d")
    async with world(worker, queue_seconds=10) as here:
        here.registry.register(worker.info(), worker.load(num_waiting=1))
        with pytest.raises(Overloaded, match="asks not to wait"):
            await here.dispatcher.submit(ask(reject_if_busy=True))
        assert await tokens_of(await here.dispatcher.submit(ask())) == [answer()]


async def test_a_request_that_no_pool_could_ever_hold_does_not_wait() -> None:
    worker = ScriptedWorker("d")
    worker.pool.num_total_blocks = 3
    async with world(worker, queue_seconds=10) as here:
        with pytest.raises(ContextTooLong, match="the largest has 48"):
            await here.dispatcher.submit(ask(max_tokens=20))


async def test_a_session_stays_with_its_workers() -> None:
    async with world(*(ScriptedWorker(name) for name in "abc")) as here:
        spread = [await here.dispatcher.submit(ask(request_id=str(i), session_affinity="other")) for i in range(1)]
        first = await here.dispatcher.submit(ask(request_id="one", session_affinity="mine"))
        for flight in (*spread, first):
            await tokens_of(flight)
        again = await here.dispatcher.submit(ask(request_id="two", session_affinity="mine"))
        await tokens_of(again)
        assert again.route["decode"] == first.route["decode"]


async def test_a_finished_request_proves_its_model() -> None:
    proofs: list[tuple[str, bool]] = []
    async with world(ScriptedWorker("d")) as here:
        here.dispatcher.proven = lambda model_id, handed_over: proofs.append((model_id, handed_over))
        await (await here.dispatcher.submit(ask())).aclose()
        assert proofs == []
        await tokens_of(await here.dispatcher.submit(ask(request_id="s")))
        assert proofs == [(MODEL, False)]  # there is no prefill worker here


async def test_stopping_a_choice_that_moves_does_not_end_the_others() -> None:
    async def move_choice_zero(worker: ScriptedWorker, say: Say, submit: pb.Submit) -> None:
        say.accept(submit)
        if submit.choice_index == 0:
            say.tokens(submit, len(PROMPT), answer(1))
            say.fail(submit, Unavailable("this one only"))
        else:
            await stopped.wait()
            await serve(worker, say, submit)

    stopped = asyncio.Event()
    first, second = ScriptedWorker("a", behave=move_choice_zero), ScriptedWorker("b", behave=silent)
    async with world(first, second, queue_seconds=5) as here:
        flight = await here.dispatcher.submit(ask(num_choices=2))
        await second.until(lambda second: len(second.submits) == 1)
        await flight.stop_choice(0)
        stopped.set()
        assert (await tokens_of(flight))[1] == answer()
