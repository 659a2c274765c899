"""Parts of a request go to the encode workers with the least to do, and elsewhere if one of them fails."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from opentelemetry.metrics import CallbackOptions
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from control_plane.admission.attachment import Attachment, Grant
from control_plane.admission.service_classes import ServiceClass
from control_plane.dispatch.encoding import (
    MAX_CANDIDATES,
    MAX_PART_INPUTS,
    MAX_PART_TOKENS,
    EncodingDispatch,
    _part,
)
from control_plane.fleet.encoder_clients import EncoderClients
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.generation import EncoderFacts, EncoderInput, EncodingRequest, ModelDescription, TokenIds
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import (
    Aborted,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    TandemError,
    Unavailable,
)
from tandem_runtime.kv.spaces import model_identity
from tests.control_plane.api.model import description

MODEL = description(
    identity=model_identity(pb.Fingerprint()).hex(), task="text-embedding", encoder=EncoderFacts(2, (), "mean", True)
)
Behaviour = Callable[[pb.EncodeRequest], Awaitable[bytes]]


def values_of(token_ids: bytes) -> bytes:
    ids = TokenIds.unpack(token_ids)
    return struct.pack("<2f", len(ids), sum(ids))


async def answer(request: pb.EncodeRequest) -> bytes:
    await asyncio.sleep(0)  # other parts are sent meanwhile
    return b"".join(values_of(each.token_ids) for each in request.inputs)


def fail(error: Exception) -> Behaviour:
    async def raise_it(request: pb.EncodeRequest) -> bytes:
        raise error

    return raise_it


class Fleet(EncoderClients):
    """Stand-in workers by id, each with a behaviour; keeps every call."""

    def __init__(self, *names: str, queue_seconds: float = 5.0, max_waiting: int = 8) -> None:
        self.registry = WorkerRegistry(3.0, 5.0)
        self.behaviours: dict[str, Behaviour] = {}
        self.calls: list[tuple[str, pb.EncodeRequest]] = []
        self.attachments: dict[str, Attachment] = {}
        """To workers that grant."""
        super().__init__(self.registry)
        self.dispatch = EncodingDispatch(self.registry, self, queue_seconds, max_waiting)
        for name in names:
            self.register(name)

    def register(self, name: str, life: str = "1", *, num_tokens: int = 0, model: ModelDescription = MODEL) -> None:
        self.behaviours.setdefault(name, answer)
        card = pb.ModelCard(
            model_id=model.model_id,
            fingerprint=pb.Fingerprint(digest=bytes.fromhex(MODEL.fingerprint)),
            task="text-embedding",
            encoder=pb.EncoderCard(num_values=2),
        )
        info = pb.WorkerInfo(
            worker_id=name, incarnation=f"{name}-{life}", role=pb.WORKER_ROLE_ENCODE, address="x", card=card
        )
        load = pb.LoadReport(state=pb.WORKER_STATE_READY, num_tokens_in_flight=num_tokens)
        self.registry.register(info, load)

    def report(self, name: str) -> None:
        """Take in a heartbeat of a worker with nothing to do."""
        worker = self.registry.get(name)
        assert worker is not None, "registered"
        load = pb.LoadReport(state=pb.WORKER_STATE_READY)
        beat = cp.HeartbeatRequest(worker_id=name, incarnation=worker.incarnation, load=load)
        assert self.registry.heartbeat(beat)

    async def encode(
        self, worker: Worker, request: pb.EncodeRequest, num_tokens: int, timeout: float
    ) -> pb.EncodeReply:
        assert 0 < request.time_left_ms / 1000 <= timeout
        assert num_tokens == sum(len(each.token_ids) for each in request.inputs) // 4
        self.calls.append((worker.worker_id, request))
        if worker.worker_id in self.attachments:
            self.attachments[worker.worker_id].sent(num_tokens, time.monotonic())
        return pb.EncodeReply(values=await self.behaviours[worker.worker_id](request))

    def has_room(self, worker: Worker, num_tokens: int, num_calls: int = 1) -> bool | None:
        attachment = self.attachments.get(worker.worker_id)
        return attachment.has_room(num_tokens, num_calls, time.monotonic()) if attachment is not None else None

    def uses_grants(self, worker: Worker) -> bool:
        return worker.worker_id in self.attachments

    def grant(self, name: str, num_tokens: int, num_calls: int = 100) -> None:
        """A worker grants so much from now on."""
        worker, attachment = self.registry.get(name), self.attachments.setdefault(name, Attachment())
        assert worker is not None, "registered"
        sums = attachment.num_tokens + num_tokens, attachment.num_requests + num_calls
        attachment.granted(Grant(1, *sums, valid_seconds=60.0), time.monotonic())
        self._on_grant(worker, pb.Grant())

    def tell(self, name: str, **leads: float) -> None:
        """A worker says how far accounts are ahead of the one that is next."""
        worker = self.registry.get(name)
        assert worker is not None, "registered"
        turns = [pb.AccountTurn(fairness_key=account, lead=lead, num_elsewhere=1) for account, lead in leads.items()]
        self._on_grant(worker, pb.Grant(turns=turns))

    async def values(self, inputs: Sequence[EncoderInput], **changes: Any) -> bytes:
        request = EncodingRequest("r", "me", MODEL, inputs, time.monotonic() + 30, pooling="cls")
        self.computed: list[int] = []
        return await asyncio.wait_for(self.dispatch.encode(replace(request, **changes), self.computed), 20)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the stand-ins tell nobody
            await asyncio.sleep(0)


def inputs(*lengths: int) -> list[EncoderInput]:
    return [
        EncoderInput(TokenIds((index + place) % 97 for place in range(length)).packed())
        for index, length in enumerate(lengths)
    ]


def expected(of: Sequence[EncoderInput]) -> bytes:
    return b"".join(values_of(each.token_ids) for each in of)


async def test_a_request_is_cut_into_parts_and_put_together_in_order() -> None:
    fleet = Fleet("a", "b")
    texts = inputs(*[3] * (2 * MAX_PART_INPUTS + 5), MAX_PART_TOKENS + 9, *[1_500] * 4)
    assert await fleet.values(texts) == expected(texts)
    sizes = [(len(call.inputs), sum(len(each.token_ids) // 4 for each in call.inputs)) for _, call in fleet.calls]
    assert all(num <= MAX_PART_INPUTS and (tokens <= MAX_PART_TOKENS or num == 1) for num, tokens in sizes)
    assert sum(fleet.computed) == sum(each.num_tokens for each in texts) and len(fleet.computed) == len(sizes)
    assert {name for name, _ in fleet.calls} == {"a", "b"}
    call = fleet.calls[0][1]
    assert (call.request_id, call.fairness_key, call.pooling, call.model.model_id) == ("r", "me", "cls", MODEL.model_id)
    assert call.model.fingerprint.hex() == MODEL.fingerprint


async def test_the_worker_with_the_fewest_tokens_gets_the_next_part() -> None:
    fleet = Fleet()
    fleet.register("busy", num_tokens=1_000)
    fleet.register("free", num_tokens=10)
    texts = inputs(5)
    await asyncio.gather(*(fleet.values(texts) for _ in range(3)))
    assert {name for name, _ in fleet.calls} == {"free"}
    gate = asyncio.Event()

    async def wait(request: pb.EncodeRequest) -> bytes:
        await gate.wait()
        return await answer(request)

    fleet.behaviours["free"] = wait
    first = asyncio.create_task(fleet.values(inputs(2_000)))
    await until(lambda: len(fleet.calls) >= 4)
    await fleet.values(texts)
    assert fleet.calls[-1][0] == "busy", "what was sent counts before it is reported"
    gate.set()
    await first


@pytest.mark.parametrize("error", [Unavailable("gone"), Draining("draining"), Overloaded("full"), InternalError("bug")])
async def test_a_part_that_a_worker_does_not_answer_goes_to_another_with_the_same_values(error: TandemError) -> None:
    fleet = Fleet("a", "b")
    fleet.behaviours["a"] = fail(error)
    texts = inputs(*[7] * (3 * MAX_PART_INPUTS))
    assert await fleet.values(texts) == expected(texts)
    assert {name for name, _ in fleet.calls} == {"a", "b"}
    assert sum(fleet.computed) == 7 * len(texts), "a part that was lost is counted once"


async def test_each_attempt_says_its_number_and_the_trace_it_belongs_to() -> None:
    fleet = Fleet("a", "b")
    fleet.behaviours["a"] = fail(Unavailable("gone"))
    fleet.behaviours["b"] = fail(Unavailable("gone"))
    parent = SpanContext(trace_id=7 << 64 | 1, span_id=9, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    with use_span(NonRecordingSpan(parent)), pytest.raises(TandemError):
        await fleet.values(inputs(5), deadline=time.monotonic() + 1)
    calls = [call for _, call in fleet.calls]
    assert [call.attempt for call in calls] == list(range(1, len(calls) + 1)) and len(calls) > 1
    assert {call.traceparent.split("-")[1] for call in calls} == {f"{7 << 64 | 1:032x}"}


@pytest.mark.parametrize(
    "values", [b"", b"\0" * 12, struct.pack("<2f", float("nan"), 1), struct.pack("<2f", float("inf"), -1)]
)
async def test_values_that_cannot_be_right_are_never_shown(values: bytes) -> None:
    fleet = Fleet("a", "b")

    async def wrong(request: pb.EncodeRequest) -> bytes:
        return values

    fleet.behaviours["a"] = wrong
    texts = inputs(4)
    for _ in range(2):
        assert await fleet.values(texts) == expected(texts)
    assert "a" in {name for name, _ in fleet.calls}


async def test_a_request_waits_while_all_are_full_and_is_answered_once_one_has_room() -> None:
    fleet = Fleet("a", "b")
    for name in "ab":
        fleet.behaviours[name] = fail(Overloaded("256 calls wait"))
    waiting = asyncio.create_task(fleet.values(inputs(4)))
    await until(lambda: len(fleet.dispatch.queue) == 1)
    assert len(fleet.calls) == 2
    fleet.report("a")
    await until(lambda: len(fleet.calls) == 4 and len(fleet.dispatch.queue) == 1)
    fleet.behaviours["b"] = answer
    fleet.report("b")
    assert await waiting == expected(inputs(4))
    assert len(fleet.calls) == 6, "nothing is sent again unless something has changed"


async def test_a_request_that_waits_too_long_or_must_not_wait_is_refused_with_the_reason() -> None:
    fleet = Fleet("a", queue_seconds=0.05)
    fleet.behaviours["a"] = fail(Overloaded("256 calls wait", retry_after_seconds=3.0))
    with pytest.raises(Overloaded, match="every encode worker of @tandem/demo is busy") as raised:
        await fleet.values(inputs(4))
    assert raised.value.retry_after_seconds is not None and 1.5 <= raised.value.retry_after_seconds <= 4.5
    num_calls = len(fleet.calls)
    with pytest.raises(Overloaded, match="is busy"):
        await fleet.values(inputs(4), reject_if_busy=True)
    assert len(fleet.calls) == num_calls + 1
    nobody = Fleet(queue_seconds=0.05)
    with pytest.raises(Unavailable, match="no encode worker is ready for @tandem/demo"):
        await nobody.values(inputs(4))


async def test_a_part_waits_until_a_worker_grants_room_and_is_sent_nowhere_before() -> None:
    fleet = Fleet("a", "b")
    fleet.grant("a", 0)
    fleet.grant("b", 0)
    waiting = asyncio.create_task(fleet.values(inputs(4)))
    await until(lambda: len(fleet.dispatch.queue) == 1)
    fleet.grant("a", 3)
    with pytest.raises(Overloaded, match="every encode worker of @tandem/demo is busy"):
        await fleet.values(inputs(4), reject_if_busy=True)
    assert not fleet.calls and len(fleet.dispatch.queue) == 1
    fleet.grant("b", 4)
    assert await waiting == expected(inputs(4))
    assert [name for name, _ in fleet.calls] == ["b"]


async def test_as_many_parts_are_let_in_at_once_as_grants_allow_and_accounts_take_turns_by_tokens() -> None:
    fleet = Fleet("a", max_waiting=64)
    fleet.grant("a", 0)
    waiting = []
    for account, num, length in (("long", 4, 100), ("short", 30, 10)):
        waiting += [asyncio.create_task(fleet.values(inputs(length), account=account)) for _ in range(num)]
    await until(lambda: len(fleet.dispatch.queue) == 34)
    # 1. Both accounts get a half of the tokens. The parts look in one turn of the loop, and are sent in the next.
    fleet.grant("a", 400)
    await asyncio.sleep(0)
    assert not fleet.calls and len(fleet.dispatch._let_in) == 22
    await asyncio.sleep(0)
    assert Counter(request.fairness_key for _, request in fleet.calls) == {"long": 2, "short": 20}
    # 2. The number of calls is a bound, too.
    fleet.grant("a", 400, 3)
    await until(lambda: len(fleet.calls) == 25)
    fleet.grant("a", 4_000)
    assert [len(each) for each in await asyncio.gather(*waiting)] == [8] * 34
    assert not fleet.dispatch._let_in and not len(fleet.dispatch.queue)


async def test_what_a_part_was_charged_is_given_back_if_it_ends_as_its_turn_comes() -> None:
    fleet = Fleet("a")
    fleet.grant("a", 0)
    ending = asyncio.create_task(fleet.values(inputs(50)))
    await until(lambda: len(fleet.dispatch.queue) == 1)
    counters = fleet.dispatch.queue.room(MODEL.model_id).counters[0]
    fleet.grant("a", 50)
    await asyncio.sleep(0)
    assert counters.of("me") == 50.0
    fleet.dispatch.stop(lambda: Draining("the gateway stops"))
    with pytest.raises(Draining):
        await ending
    assert counters.of("me") == 0.0 and not fleet.dispatch._let_in and not fleet.calls


async def test_a_part_that_comes_passes_none_that_waits() -> None:
    fleet = Fleet("a")
    fleet.grant("a", 5)
    first = asyncio.create_task(fleet.values(inputs(50)))
    await until(lambda: len(fleet.dispatch.queue) == 1)
    second = asyncio.create_task(fleet.values(inputs(5)))
    await until(lambda: len(fleet.dispatch.queue) == 2)
    fleet.grant("a", 55)
    assert [await first, await second] == [expected(inputs(50)), expected(inputs(5))]
    assert [len(request.inputs[0].token_ids) for _, request in fleet.calls] == [200, 20]


async def test_work_is_counted_in_tokens_as_workers_count_it_and_forgotten_with_the_worker() -> None:
    fleet = Fleet("a")
    fleet.grant("a", 0)
    waiting = [asyncio.create_task(fleet.values(inputs(50), account=account)) for account in ("me", "you")]
    await until(lambda: len(fleet.dispatch.queue) == 2)
    room = fleet.dispatch.queue.room(MODEL.model_id)
    assert [each.work for each in fleet.dispatch.queue.demand(MODEL.model_id).accounts] == [50.0, 50.0]
    fleet.tell("a", me=30.0, you=0.0)
    assert room.counters[0].of("me") - room.counters[0].of("you") == 30.0
    fleet.register("a", "2")
    assert room._elsewhere.leads() == {}
    fleet.grant("a", 100)
    await asyncio.gather(*waiting)


async def test_texts_of_the_batch_class_wait_for_all_others() -> None:
    fleet = Fleet("a")
    fleet.grant("a", 0)
    waiting = [asyncio.create_task(fleet.values(inputs(50), priority=ServiceClass.BATCH))]
    await until(lambda: len(fleet.dispatch.queue) == 1)
    waiting.append(asyncio.create_task(fleet.values(inputs(40))))
    await until(lambda: len(fleet.dispatch.queue) == 2)
    found = {each.attributes["class"]: each.value for each in fleet.dispatch.queue.counts.waiting(CallbackOptions())}  # type: ignore[index]
    assert found == {"batch": 1, "default": 1}
    fleet.grant("a", 50)
    await until(lambda: len(fleet.calls) == 1)
    fleet.grant("a", 50)
    await asyncio.gather(*waiting)
    assert [len(request.inputs[0].token_ids) for _, request in fleet.calls] == [160, 200]


async def test_a_request_that_has_begun_is_not_refused_because_others_wait() -> None:
    fleet = Fleet("a", max_waiting=8)
    fleet.grant("a", 4 * MAX_PART_TOKENS)
    texts = inputs(*[MAX_PART_TOKENS] * 6)
    begun = asyncio.create_task(fleet.values(texts))
    await until(lambda: len(fleet.calls) == 4 and len(fleet.dispatch.queue) == 2)
    others = [asyncio.create_task(fleet.values(inputs(5), account=account)) for account in "abcdefgh"]
    done, _ = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
    assert all(isinstance(each.exception(), Overloaded) for each in done)
    fleet.grant("a", 1 << 20)
    assert await begun == expected(texts)
    await asyncio.gather(*others, return_exceptions=True)


async def test_a_part_asks_three_workers_and_then_waits() -> None:
    fleet = Fleet(*"abcde")
    for name in "abcde":
        fleet.behaviours[name] = fail(Overloaded("full"))
    waiting = asyncio.create_task(fleet.values(inputs(4)))
    await until(lambda: len(fleet.dispatch.queue) == 1)
    assert len({name for name, _ in fleet.calls}) == len(fleet.calls) == MAX_CANDIDATES
    for name in "abcde":
        fleet.behaviours[name] = answer
    fleet.report("e")
    assert await waiting == expected(inputs(4))
    assert len(fleet.calls) == MAX_CANDIDATES + 1


async def test_of_a_hundred_workers_the_only_one_that_has_room_answers() -> None:
    fleet = Fleet(*(f"w-{number}" for number in range(100)))
    for number in range(100):
        fleet.grant(f"w-{number}", 0, 0)
    waiting = [asyncio.create_task(fleet.values(inputs(5))) for _ in range(4)]
    await until(lambda: len(fleet.dispatch.queue) == 4)
    fleet.grant("w-77", 100)
    assert [await each for each in waiting] == [expected(inputs(5))] * 4
    assert await fleet.values(inputs(5), reject_if_busy=True) == expected(inputs(5))
    assert {name for name, _ in fleet.calls} == {"w-77"}


async def test_the_queue_has_a_bound() -> None:
    fleet = Fleet("a", max_waiting=2)
    fleet.behaviours["a"] = fail(Overloaded("full"))
    waiting = [asyncio.create_task(fleet.values(inputs(4), account=account)) for account in "abc"]
    done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(Overloaded, match="2 requests wait for @tandem/demo already, the limit is 2"):
        await next(iter(done))
    fleet.behaviours["a"] = answer
    fleet.report("a")
    assert [await each for each in left] == [expected(inputs(4))] * 2


async def test_a_model_whose_workers_are_full_delays_no_other() -> None:
    fleet = Fleet("a", max_waiting=2)
    fleet.behaviours["a"] = fail(Overloaded("full"))
    waiting = [asyncio.create_task(fleet.values(inputs(4), account=account)) for account in "ab"]
    await until(lambda: len(fleet.dispatch.queue) == 2)
    other = replace(MODEL, model_id="other")
    fleet.register("b", model=other)
    assert await fleet.values(inputs(4), model=other) == expected(inputs(4))
    assert dict(fleet.dispatch.queue.num_by_model()) == {MODEL.model_id: 2}
    fleet.behaviours["a"] = answer
    fleet.report("a")
    assert [await each for each in waiting] == [expected(inputs(4))] * 2


async def test_a_worker_that_comes_back_answers_what_waited_for_it() -> None:
    fleet = Fleet("a")
    fleet.behaviours["a"] = fail(Unavailable("connection refused"))
    waiting = asyncio.create_task(fleet.values(inputs(4)))
    await until(lambda: len(fleet.dispatch.queue) == 1)
    fleet.behaviours["a"] = answer
    fleet.register("a", "2")
    assert await waiting == expected(inputs(4))


async def test_a_request_that_ends_one_worker_after_the_other_is_stopped() -> None:
    fleet = Fleet("a", "b", "c", "d")
    for name in "abcd":
        fleet.behaviours[name] = fail(Unavailable("the engine was ended by SIGSEGV"))
    with pytest.raises(Aborted, match=r"3 encode workers were lost with this request.*SIGSEGV"):
        await fleet.values(inputs(4))
    assert len(fleet.calls) == 3


@pytest.mark.parametrize("error", [InvalidRequest("input 0 has ids beyond"), DeadlineExceeded("too late")])
async def test_what_no_worker_would_answer_is_not_sent_again(error: TandemError) -> None:
    fleet = Fleet("a", "b")
    for name in "ab":
        fleet.behaviours[name] = fail(error)
    with pytest.raises(type(error)):
        await fleet.values(inputs(4))
    assert len(fleet.calls) == 1


async def test_what_was_computed_before_a_failure_is_known() -> None:
    fleet = Fleet("a")

    async def second_fails(request: pb.EncodeRequest) -> bytes:
        if len(request.inputs) < MAX_PART_INPUTS:
            await asyncio.sleep(0)
            raise InvalidRequest("no")
        return await answer(request)

    fleet.behaviours["a"] = second_fails
    with pytest.raises(InvalidRequest):
        await fleet.values(inputs(*[2] * (MAX_PART_INPUTS + 1)))
    assert fleet.computed == [2 * MAX_PART_INPUTS]


def test_a_part_has_its_requests_deadline_in_the_queue() -> None:
    request = EncodingRequest("r", "me", MODEL, inputs(4), 112.5, pooling="cls")
    assert _part(request, request.inputs).waiter.deadline == 112.5, "else it could wait beyond it"


async def test_a_passed_deadline_and_a_client_that_leaves_end_the_calls() -> None:
    fleet = Fleet("a")
    with pytest.raises(DeadlineExceeded):
        await fleet.values(inputs(4), deadline=time.monotonic() - 1)
    assert not fleet.calls
    was_cancelled = asyncio.Event()

    async def wait(request: pb.EncodeRequest) -> bytes:
        try:
            return cast(bytes, await asyncio.Future())
        finally:
            was_cancelled.set()

    fleet.behaviours["a"] = wait
    leaving = asyncio.create_task(fleet.values(inputs(4)))
    await until(lambda: bool(fleet.calls))
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert was_cancelled.is_set() and not fleet.dispatch._tokens


async def test_a_gateway_that_stops_ends_the_parts_that_workers_compute_and_those_that_wait() -> None:
    fleet = Fleet("a")

    async def never(request: pb.EncodeRequest) -> bytes:
        return cast(bytes, await asyncio.Future())

    fleet.behaviours["a"] = never
    running = asyncio.create_task(fleet.values(inputs(4)))
    await until(lambda: bool(fleet.calls))
    fleet.behaviours["a"] = fail(Overloaded("full"))
    waiting = asyncio.create_task(fleet.values(inputs(4)))
    await until(lambda: len(fleet.dispatch.queue) == 1)
    fleet.dispatch.stop(lambda: Draining("the gateway stops"))
    for ended in (running, waiting, fleet.values(inputs(4))):
        with pytest.raises(Draining, match="the gateway stops"):
            await asyncio.wait_for(ended, 10)
    assert fleet.dispatch.num_requests == 0 and not fleet.dispatch._tokens
