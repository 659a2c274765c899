"""The front of an encode worker, over a scripted engine: every call ends once, and none is lost."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from encode_svc.front import EncodeFront
from encode_svc.service import EncodeService
from tandem.v1 import types_pb2 as pb
from tandem.v1.worker_pb2 import DrainRequest
from tandem_engine import messages
from tandem_engine.encoder.messages import (
    CancelTexts,
    EncoderInfo,
    EncoderReady,
    EncoderStats,
    EncodeTexts,
    TextInput,
    TextsEncoded,
    TextsRefused,
)
from tandem_runtime.device_reader import EngineMemory
from tandem_runtime.errors import (
    DeadlineExceeded,
    Draining,
    FingerprintMismatch,
    InternalError,
    InvalidRequest,
    Overloaded,
    StaleIncarnation,
    TandemError,
    Unavailable,
)
from tandem_worker.engine_state import EXIT_CONFIG
from tandem_worker.model_card import AssetStore, fingerprint
from tests.tandem_worker import scripted_engine
from tests.tandem_worker.scripted_engine import ScriptedEngine

INFO = scripted_engine.ready().model
MODEL = pb.ModelRef(model_id="m", fingerprint=fingerprint(INFO).digest)
READY = EncoderReady(INFO, EncoderInfo("text-embedding", 2, [], "mean", True, False))
VALUES = struct.pack("<4f", 0.6, 0.8, 1.0, 0.0)


class Harness:
    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.front = EncodeFront(self.engine)
        self.is_ready = asyncio.Event()
        self.front.when_ready(lambda paths: self.is_ready.set())
        self.pump = asyncio.create_task(self.front.pump())

    def call(self, **fields: Any) -> asyncio.Task[pb.EncodeReply]:
        return asyncio.create_task(self.front.encode(request(**fields)))

    async def sent(self, num: int) -> list[EncodeTexts]:
        """Return the calls that the engine has got, once they are `num`."""
        async with asyncio.timeout(10):
            while len(found := self.engine.sent_of(EncodeTexts)) < num:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0)
        return found

    def answer(self, call: EncodeTexts) -> None:
        self.engine.emit(TextsEncoded(call.key, VALUES, 5, scheduled_ns=2, finished_ns=3))


@asynccontextmanager
async def harness() -> AsyncIterator[Harness]:
    """Yield a front whose engine has loaded; at the end no call may be left."""
    here = Harness()
    here.engine.emit(READY)
    await asyncio.wait_for(here.is_ready.wait(), 10)
    try:
        yield here
        assert not here.front._calls
    finally:
        await here.front.close()
        await asyncio.wait_for(here.pump, 10)


def request(**fields: Any) -> pb.EncodeRequest:
    inputs = [pb.EncodeInput(token_ids=struct.pack("<2I", 1, 2)), pb.EncodeInput(token_ids=b"\3\0\0\0")]
    values: dict[str, Any] = {"request_id": "r", "model": MODEL, "inputs": inputs, "time_left_ms": 60_000}
    return pb.EncodeRequest(**{**values, **fields})


async def error_of(call: asyncio.Task[pb.EncodeReply]) -> TandemError:
    with pytest.raises(TandemError) as raised:
        await asyncio.wait_for(call, 10)
    return raised.value


async def test_calls_are_answered_by_their_keys_whatever_the_order() -> None:
    async with harness() as here:
        calls = [here.call(fairness_key="a", pooling="cls"), here.call(request_id="s")]
        first, second = await here.sent(2)
        assert (first.inputs[0], first.fairness_key, first.pooling) == (TextInput(struct.pack("<2I", 1, 2)), "a", "cls")
        here.answer(second)
        reply = await asyncio.wait_for(calls[1], 10)
        assert (reply.values, reply.ledger.num_tokens, reply.ledger.scheduled_ns) == (VALUES, 5, 2)
        assert not calls[0].done()
        here.answer(first)
        await asyncio.wait_for(calls[0], 10)


async def test_the_card_says_what_the_model_makes_of_a_text() -> None:
    async with harness() as here:
        card = here.front.card
        assert card is not None and (card.task, card.block_size) == ("text-embedding", 0)
        assert (card.encoder.num_values, card.encoder.pooling, card.encoder.is_normalized) == (2, "mean", True)
        assert here.front.load().state == pb.WORKER_STATE_READY


@pytest.mark.parametrize(
    ("reason", "kind"), [("invalid", InvalidRequest), ("full", Overloaded), ("failed", InternalError)]
)
async def test_a_refusal_of_the_engine_has_its_kind(reason: Any, kind: type[TandemError]) -> None:
    async with harness() as here:
        call = here.call()
        (sent,) = await here.sent(1)
        here.engine.emit(TextsRefused(sent.key, "input 1 has 600 tokens", reason))
        error = await error_of(call)
        assert type(error) is kind and "600 tokens" in error.message
        assert (error.retry_after_seconds is not None) == (reason == "full")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"inputs": []}, InvalidRequest),
        ({"pooling": "max"}, InvalidRequest),
        ({"time_left_ms": 0}, DeadlineExceeded),
        ({"model": pb.ModelRef(model_id="m", fingerprint=b"other")}, FingerprintMismatch),
    ],
)
async def test_a_call_that_cannot_be_answered_never_reaches_the_engine(
    fields: dict[str, Any], kind: type[TandemError]
) -> None:
    async with harness() as here:
        assert isinstance(await error_of(here.call(**fields)), kind)
        assert not here.engine.sent_of(EncodeTexts)


async def test_a_call_whose_deadline_passes_or_whose_gateway_leaves_is_dropped_in_the_engine() -> None:
    async with harness() as here:
        late, left = here.call(time_left_ms=20), here.call()
        first, second = await here.sent(2)
        assert isinstance(await error_of(late), DeadlineExceeded)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert here.engine.sent_of(CancelTexts) == [CancelTexts(first.key), CancelTexts(second.key)]
        here.answer(second)  # the engine had finished already
        after = here.call()
        here.answer((await here.sent(3))[2])
        assert (await asyncio.wait_for(after, 10)).values == VALUES


async def test_a_dead_engine_fails_all_calls_so_that_they_go_on_elsewhere() -> None:
    async with harness() as here:
        calls = [here.call(), here.call()]
        await here.sent(2)
        here.engine.emit(messages.EngineFailed("out of memory"))
        here.engine.end()
        await asyncio.wait_for(here.front.state.stopped.wait(), 10)
        assert {type(await error_of(call)) for call in (*calls, here.call())} == {Unavailable}
        assert (here.front.load().state, here.front.state.exit_code) == (pb.WORKER_STATE_FAILED, 1)


async def test_a_model_that_is_refused_ends_the_worker_for_good() -> None:
    here = Harness()
    here.engine.emit(messages.LoadProgress("reading config.json", 0.1))
    here.engine.emit(messages.EngineFailed("modernbert is not supported", "unsupported"))
    here.engine.end()
    await asyncio.wait_for(here.front.state.stopped.wait(), 10)
    assert here.front.state.exit_code == EXIT_CONFIG
    assert (here.front.load().load_stage, here.front.load().error) == (
        "reading config.json",
        "modernbert is not supported",
    )
    await here.front.close()
    await here.pump


async def test_an_engine_that_is_silent_loses_its_calls_and_may_wake_again() -> None:
    async with harness() as here:
        call = here.call()
        (sent,) = await here.sent(1)
        here.front.state.watch.is_silent = True
        here.front.state.silent(11.0)
        assert isinstance(await error_of(call), Unavailable)
        assert isinstance(await error_of(here.call()), Unavailable), "nothing new meanwhile"
        assert here.front.load().state == pb.WORKER_STATE_LOADING
        here.answer(sent)  # it wakes, and answers what nobody awaits
        async with asyncio.timeout(10):
            while here.front.state.watch.is_silent:  # noqa: ASYNC110 - the watch tells nobody
                await asyncio.sleep(0)
        after = here.call()
        here.answer((await here.sent(2))[1])
        await asyncio.wait_for(after, 10)


async def test_a_draining_worker_refuses_what_is_new_and_finishes_what_runs() -> None:
    async with harness() as here:
        old = here.call()
        (sent,) = await here.sent(1)
        here.front.state.start_draining()
        draining = asyncio.create_task(here.front.drain(30))
        assert isinstance(await error_of(here.call()), Draining)
        assert not draining.done()
        here.answer(sent)
        await asyncio.wait_for(old, 10)
        await asyncio.wait_for(draining, 10)
        assert here.front.load().state == pb.WORKER_STATE_DRAINING


async def test_an_operator_drains_and_resumes_an_encode_worker() -> None:
    async with harness() as here:
        service = EncodeService(here.front, "life-1", AssetStore(), pb.WorkerInfo)
        running = here.call()
        (sent,) = await here.sent(1)
        drained = await service.Drain(DrainRequest(incarnation="life-1"), None)
        assert drained.state == here.front.load().state == pb.WORKER_STATE_DRAINING
        assert isinstance(await error_of(here.call()), Draining)
        here.answer(sent)
        await asyncio.wait_for(running, 10)
        await service.Drain(DrainRequest(incarnation="life-1", resume=True), None)
        after = here.call()
        here.answer((await here.sent(2))[1])
        await asyncio.wait_for(after, 10)
        with pytest.raises(StaleIncarnation):
            await service.Drain(DrainRequest(incarnation="life-0"), None)


async def test_a_drain_that_takes_too_long_lets_calls_go_on_elsewhere() -> None:
    async with harness() as here:
        call = here.call()
        await here.sent(1)
        here.front.state.start_draining()
        await here.front.drain(0.02)
        assert isinstance(await error_of(call), Draining)


async def test_the_load_is_that_of_the_calls_and_nothing_once_they_are_answered() -> None:
    async with harness() as here:
        calls = [here.call(), here.call()]
        first, second = await here.sent(2)
        here.engine.emit(EncoderStats(1, 1, 3, {"steps": 4.0}, 6))
        here.answer(first)
        await asyncio.wait_for(calls[0], 10)
        load = here.front.load()
        assert (load.num_running, load.num_waiting, load.num_tokens_in_flight) == (0, 1, 3)
        assert dict(load.counters) == {"steps": 4.0}
        here.answer(second)
        await asyncio.wait_for(calls[1], 10)
        load = here.front.load()
        assert (load.num_running, load.num_waiting, load.num_tokens_in_flight) == (0, 0, 0)


async def test_a_message_of_another_kind_of_engine_ends_the_worker() -> None:
    async with harness() as here:
        here.engine.emit(scripted_engine.step())
        await asyncio.wait_for(here.front.state.stopped.wait(), 10)
        assert isinstance(here.front.state.failure, InternalError)


async def test_what_the_engine_counts_of_its_device_is_known_once_it_has_loaded() -> None:
    async with harness() as here:
        assert here.front.state.engine_memory is None
        here.engine.emit(messages.DeviceMemoryUsed("a uuid", 5))
        here.engine.emit(messages.DeviceMemoryUsed("a uuid", 7))
        async with asyncio.timeout(10):
            while here.front.state.engine_memory != EngineMemory("a uuid", 7):  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0)
