"""An encode worker and its gateways, over real gRPC: what gateways send fits, and what ends gives its room back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from encode_svc import front
from encode_svc.call_counts import Amount
from encode_svc.grants import WINDOW_TOKENS
from tandem.v1 import types_pb2 as pb
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import Draining, InvalidRequest, StaleIncarnation
from tests.encode_svc.fleet import CARD, Gateway, OneWorker, one_worker, until

MAX_CALLS = 16
EMPTY = Amount(MAX_CALLS, WINDOW_TOKENS)
HELLO = pb.AttachHello(worker_incarnation="e-1")


@asynccontextmanager
async def worker_and_gateways(num: int, **worker: Any) -> AsyncIterator[tuple[OneWorker, list[Gateway]]]:
    async with one_worker(max_calls=MAX_CALLS, **worker) as here:
        gateways = [Gateway(here) for _ in range(num)]
        try:
            yield here, gateways
        finally:
            await asyncio.gather(*(each.close() for each in gateways))


def room(worker: OneWorker) -> Amount:
    """Return what the worker has free of its window."""
    found = worker.front.grants._room()
    return Amount(found.num_requests, found.num_tokens)


def granted(gateway: Gateway) -> int:
    return gateway.clients.num_granted()[CARD.model_id, "encode"]


async def test_gateways_send_what_fits_and_each_account_gets_its_half_whatever_its_inputs_are() -> None:
    async with worker_and_gateways(2) as (worker, gateways):
        long, short = gateways[0].ask("long", 40, [400] * 10), gateways[1].ask("short", 40, [40] * 20)
        await until(lambda: long.num_tokens + short.num_tokens > 200_000)
        # What was sent before the streams began counts under no grant, and is gone by now.
        before, num_refused = (long.num_tokens, short.num_tokens), worker.engine.num_refused
        worker.engine.most_tokens = 0
        await until(lambda: long.num_tokens + short.num_tokens - sum(before) > 400_000)
        part = (short.num_tokens - before[1]) / (long.num_tokens + short.num_tokens - sum(before))
        assert 0.4 < part < 0.6, "without grants the engine takes turns by inputs, and this is 0.09"
        assert worker.engine.num_refused == num_refused
        assert worker.engine.most_tokens <= WINDOW_TOKENS


async def test_all_clients_of_one_gateway_are_answered_whatever_they_send() -> None:
    async with worker_and_gateways(1) as (worker, (gateway,)):
        many, few = gateway.ask("many", 40, [200]), gateway.ask("few", 3, [400] * 64)
        await until(lambda: many.num_answers > 400 and few.num_answers > 2)
        assert worker.engine.num_refused == 0


async def test_the_room_of_a_gateway_that_is_killed_comes_back() -> None:
    async with worker_and_gateways(1) as (worker, (left,)):
        async with open_channel(worker.address) as channel:
            # 1. A gateway says that five calls are on their way, and that others wait. It gets grants.
            sent = pb.GrantsCommand(num_calls=5, num_tokens=9_000)
            waiting = pb.Demand(waiting=pb.WaitingRequests(num_tokens=9_000, num_requests=9, first_tokens=1_000))
            killed = stream(channel, HELLO, sent, pb.GrantsCommand(num_calls=5, num_tokens=9_000, demand=waiting))
            events = aiter(killed)
            assert (await anext(events)).stream == 1
            while (await anext(events)).grant.num_requests < 14:
                pass
            assert room(worker) == Amount(MAX_CALLS - 5, WINDOW_TOKENS - 9_000)
        # 2. Its connection breaks. What was on its way never comes, and nothing of it is left.
        await until(lambda: room(worker) == EMPTY)
        # 3. The other one gets everything.
        clients = left.ask("b", 1, [10])
        await until(lambda: clients.num_answers > 0 and granted(left) == MAX_CALLS)


async def test_calls_whose_clients_leave_give_their_room_back() -> None:
    async with worker_and_gateways(1) as (worker, (gateway,)):
        for _ in range(5):
            clients = gateway.ask("a", 2 * MAX_CALLS, [100] * 3)
            await until(lambda clients=clients: clients.num_answers > MAX_CALLS)
            await clients.leave()
        await until(lambda: room(worker) == EMPTY)
        await until(lambda: granted(gateway) == MAX_CALLS)


async def test_a_stream_that_breaks_is_opened_anew_and_both_ends_count_from_zero() -> None:
    async with worker_and_gateways(1) as (worker, (gateway,)):
        clients = gateway.ask("a", 2 * MAX_CALLS, [100] * 3)
        for number in (1, 2, 3):
            await until(lambda: gateway.clients.uses_grants(gateway.worker))
            num_answers = clients.num_answers
            await until(lambda num=num_answers: clients.num_answers > num + 50)
            assert len(worker.front.grants._open) == 1
            for each in worker.front.grants._open:
                each.close(InvalidRequest(f"the test breaks stream {number}"))
            await until(lambda: not gateway.clients.uses_grants(gateway.worker))
        await until(lambda: gateway.clients.uses_grants(gateway.worker))
        await clients.leave()
        await until(lambda: room(worker) == EMPTY)


async def test_parts_that_are_larger_than_the_window_are_computed_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front, "window_tokens", lambda step_tokens, context_length: 1_000)
    async with worker_and_gateways(2) as (worker, gateways):
        large, small = gateways[0].ask("large", 3, [3_000]), gateways[1].ask("small", 10, [10])
        await until(lambda: large.num_answers > 3 and small.num_answers > 20)
        worker.engine.most_tokens = 0  # the first ones come without grants
        await until(lambda: large.num_answers > 6)
        assert worker.engine.most_tokens <= 3_000 + 1_000


class Earlier(grpc.aio.ServerInterceptor):
    """Makes a worker of a release that knows no grants."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method.endswith("/Grants"):
            self.num_asked += 1
            return None
        return await continuation(handler_call_details)


async def test_a_worker_of_an_earlier_release_is_asked_for_grants_once_and_gets_texts_as_before() -> None:
    earlier = Earlier()
    async with worker_and_gateways(1, interceptors=[earlier]) as (_, (gateway,)):
        clients = gateway.ask("a", MAX_CALLS, [10])
        await until(lambda: clients.num_answers > 500)
        # gRPC may end the stream with "Internal error from Core", if the answer overtakes what is being written: the
        # gateway asks again then, and is told.
        num_asked = earlier.num_asked
        await until(lambda: clients.num_answers > 2_000)
        assert gateway.clients.has_room(gateway.worker, 1 << 30) is None, "by its load, as before"
        assert earlier.num_asked == num_asked <= 2 and not gateway.clients.uses_grants(gateway.worker)


async def test_a_gateway_of_an_earlier_release_is_served_and_what_it_sends_leaves_less_room() -> None:
    slow = worker_and_gateways(0, tokens_per_second=20_000)
    async with slow as (worker, _), open_channel(worker.address) as channel:
        encode = channel.unary_unary(
            "/tandem.v1.EncodeService/Encode",
            request_serializer=pb.EncodeRequest.SerializeToString,
            response_deserializer=pb.EncodeReply.FromString,
        )
        model = pb.ModelRef(model_id=CARD.model_id, fingerprint=CARD.fingerprint.digest)
        texts = [pb.EncodeInput(token_ids=bytes(4 * 1_000)) for _ in range(10)]
        call = asyncio.ensure_future(encode(pb.EncodeRequest(model=model, inputs=texts, time_left_ms=60_000)))
        await until(lambda: WINDOW_TOKENS - 10_000 <= room(worker).num_tokens < WINDOW_TOKENS)
        assert room(worker).num_calls == MAX_CALLS - 1
        assert len((await call).values) == 4 * 10
        await until(lambda: room(worker) == EMPTY)


async def test_a_worker_that_ends_does_not_wait_for_streams() -> None:
    async with worker_and_gateways(1) as (worker, (gateway,)):
        clients = gateway.ask("a", 4, [10])
        await until(lambda: gateway.clients.uses_grants(gateway.worker) and clients.num_answers > 0)
        await clients.leave()
        async with open_channel(worker.address) as channel:
            mute = stream(channel, None)
            await until(lambda: len(worker.front.grants._open) == 2)
            # 1. Streams end, also that of a caller that has never said hello, and no other one begins.
            await worker.front.drain(10.0)
            await worker.front.end_streams(10.0)
            assert [each async for each in mute] == []
            with pytest.raises(Draining):
                [each async for each in stream(channel, HELLO)]
        # 2. So the server ends long before its grace is over.
        await asyncio.wait_for(worker.server.stop(600.0), 30.0)


async def test_a_stream_begins_with_one_hello_to_this_incarnation() -> None:
    async with worker_and_gateways(0) as (worker, _), open_channel(worker.address) as channel:
        with pytest.raises(StaleIncarnation, match="e-0"):
            [each async for each in stream(channel, pb.AttachHello(worker_incarnation="e-0"))]
        with pytest.raises(InvalidRequest, match="once"):
            [each async for each in stream(channel, HELLO, HELLO)]
        with pytest.raises(InvalidRequest, match="first message"):
            [each async for each in stream(channel, pb.GrantsCommand(num_calls=1))]
        await until(lambda: len(worker.front.grants._open) == 0)


def stream(channel: Any, *first: pb.AttachHello | pb.GrantsCommand | None) -> Any:
    """Open a stream of grants that says `first`, and then nothing more."""

    async def commands() -> AsyncIterator[pb.GrantsCommand]:
        for each in first:
            if each is not None:
                yield each if isinstance(each, pb.GrantsCommand) else pb.GrantsCommand(hello=each)
        await asyncio.Future()

    call = channel.stream_stream(
        "/tandem.v1.EncodeService/Grants",
        request_serializer=pb.GrantsCommand.SerializeToString,
        response_deserializer=pb.GrantsEvent.FromString,
    )
    return call(commands())
