"""Errors, deadlines and traces survive a real channel to a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog

from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2
from tandem.v1.tables_pb2 import TablesReply
from tandem.v1.worker_pb2_grpc import WorkerServiceServicer, WorkerServiceStub, add_WorkerServiceServicer_to_server
from tandem_runtime import calls, errors, interceptors, log
from tandem_runtime.channel import call_error, open_channel
from tandem_runtime.server import GrpcServer

DECODE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

Stats = Callable[[Any], Awaitable[pb.StatsReply]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]


class Decode(WorkerServiceServicer):
    """A WorkerService whose three kinds of call do what a test says."""

    def __init__(self, stats: Stats | None = None, asset: Stream | None = None, attach: Stream | None = None) -> None:
        self._stats, self._asset, self._attach = stats, asset, attach

    async def Drain(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Stats(self, request: Any, context: Any) -> pb.StatsReply:
        assert self._stats is not None
        return await self._stats(context)

    async def Tables(self, request: Any, context: Any) -> TablesReply:
        return TablesReply()

    async def GetAsset(self, request: Any, context: Any) -> AsyncIterator[pb.Chunk]:
        assert self._asset is not None
        async for chunk in self._asset(request, context):
            yield chunk

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[pb.Event]:
        assert self._attach is not None
        async for event in self._attach(requests, context):
            yield event


@asynccontextmanager
async def decode_stub(servicer: Decode) -> AsyncIterator[Any]:
    server = GrpcServer("127.0.0.1:0", lambda s: add_WorkerServiceServicer_to_server(servicer, s), [DECODE])
    address = await server.start()
    async with open_channel(address) as channel:
        yield WorkerServiceStub(channel)
    await server.stop(0)


async def overloaded(*_: Any) -> Any:
    raise errors.Overloaded("queue holds 64 requests, the limit is 64; try later", field="n", retry_after_seconds=1.5)


async def overloaded_after_one(*_: Any) -> AsyncIterator[pb.Chunk]:
    yield pb.Chunk(offset=0, data=b"first")
    raise errors.KvCorrupt("block 3 of slab 0 has another checksum; the prompt is computed again", field="checksums")


async def test_an_error_of_a_unary_call_arrives_as_it_was_raised() -> None:
    async with decode_stub(Decode(stats=overloaded)) as stub:
        with pytest.raises(errors.Overloaded) as caught:
            await stub.Stats(pb.StatsRequest())
    assert caught.value.message == "queue holds 64 requests, the limit is 64; try later"
    assert (caught.value.field, caught.value.retry_after_seconds) == ("n", 1.5)
    cause = caught.value.__cause__
    assert isinstance(cause, grpc.aio.AioRpcError)
    assert cause.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_every_kind_of_error_arrives_as_itself() -> None:
    for kind in (errors.ModelNotFound, errors.Draining, errors.StaleIncarnation, errors.Unsupported, errors.KvNotFound):

        async def refuse(_: Any, kind: type[errors.TandemError] = kind) -> pb.StatsReply:
            raise kind("as itself")

        async with decode_stub(Decode(stats=refuse)) as stub:
            with pytest.raises(errors.TandemError) as caught:
                await stub.Stats(pb.StatsRequest())
        assert type(caught.value) is kind


async def test_an_error_in_the_middle_of_a_stream_comes_after_the_messages_before_it() -> None:
    async with decode_stub(Decode(asset=overloaded_after_one)) as stub:
        chunks = []
        with pytest.raises(errors.KvCorrupt) as caught:
            async for chunk in stub.GetAsset(pb.AssetRequest()):
                chunks.append(chunk.data)
    assert chunks == [b"first"]
    assert caught.value.field == "checksums"


async def test_an_error_of_a_two_way_stream_arrives_whether_it_is_read_or_iterated() -> None:
    async def refuse_second(requests: Any, _: Any) -> AsyncIterator[pb.Event]:
        async for command in requests:
            if command.WhichOneof("kind") == "cancel":
                raise errors.StaleIncarnation("gateway g1 speaks for a life that has ended")
            yield pb.Event(hello=command.hello)

    async with decode_stub(Decode(attach=refuse_second)) as stub:
        for take in (_read, _iterate):
            call = stub.Attach()
            await call.write(pb.Command(hello=pb.AttachHello(gateway_id="g1")))
            assert (await take(call)).hello.gateway_id == "g1"
            await call.write(pb.Command(cancel=pb.Cancel(request_id="r1")))
            with pytest.raises(errors.StaleIncarnation):
                await take(call)


async def _read(call: Any) -> Any:
    return await call.read()


async def _iterate(call: Any) -> Any:
    return await anext(call)


async def test_a_two_way_stream_ends_cleanly_on_both_ways_of_reading() -> None:
    async def echo(requests: Any, _: Any) -> AsyncIterator[pb.Event]:
        async for command in requests:
            yield pb.Event(hello=command.hello)

    async with decode_stub(Decode(attach=echo)) as stub:
        call = stub.Attach()
        await call.write(pb.Command(hello=pb.AttachHello(gateway_id="g1")))
        await call.done_writing()
        assert [event.hello.gateway_id async for event in call] == ["g1"]
        call = stub.Attach()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_write_to_a_stream_that_is_over_is_unavailable() -> None:
    async def attach(requests: Any, _context: Any) -> AsyncIterator[pb.Event]:
        yield pb.Event()

    async with decode_stub(Decode(attach=attach)) as stub:
        call = stub.Attach()
        assert await call.read() == pb.Event()
        assert await call.read() is grpc.aio.EOF
        await call.code()
        with pytest.raises(errors.Unavailable, match="the stream has ended"):
            await call.write(pb.Command())


async def test_a_handler_ends_when_the_client_of_its_stream_leaves() -> None:
    ended = asyncio.Event()

    async def endless(requests: Any, _: Any) -> AsyncIterator[pb.Event]:
        try:
            async for command in requests:
                yield pb.Event(hello=command.hello)
        finally:
            ended.set()

    async with decode_stub(Decode(attach=endless)) as stub:
        call = stub.Attach()
        await call.write(pb.Command(hello=pb.AttachHello()))
        await call.read()
        call.cancel()
        async with asyncio.timeout(10):
            await ended.wait()


async def test_what_nobody_foresaw_becomes_internal_with_an_incident_that_the_log_explains() -> None:
    async def broken(_: Any) -> pb.StatsReply:
        raise KeyError("secret inside")

    with structlog.testing.capture_logs() as lines:
        async with decode_stub(Decode(stats=broken)) as stub:
            with pytest.raises(errors.InternalError) as caught:
                await stub.Stats(pb.StatsRequest())
    [line] = [line for line in lines if line["event"] == "rpc_failed"]
    assert line["incident"] in caught.value.message
    assert isinstance(line["exc_info"], KeyError)
    assert "secret inside" not in caught.value.message


async def test_a_handler_may_still_abort_with_a_status_of_its_own() -> None:
    async def abort(context: Any) -> pb.StatsReply:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        raise AssertionError

    async with decode_stub(Decode(stats=abort)) as stub:
        with pytest.raises(errors.PeerUnauthenticated, match="no token"):
            await stub.Stats(pb.StatsRequest())


async def test_a_long_message_arrives_whole() -> None:
    message = "ä" * 5000

    async def refuse(_: Any) -> pb.StatsReply:
        raise errors.InvalidRequest(message)

    async with decode_stub(Decode(stats=refuse)) as stub:
        with pytest.raises(errors.InvalidRequest) as caught:
            await stub.Stats(pb.StatsRequest())
    assert caught.value.message == message


async def test_a_message_beyond_all_measure_is_cut_and_its_error_still_arrives() -> None:
    async def refuse(_: Any) -> pb.StatsReply:
        raise errors.InvalidRequest("x" * 1_000_000)

    async with decode_stub(Decode(stats=refuse)) as stub:
        with pytest.raises(errors.InvalidRequest) as caught:
            await stub.Stats(pb.StatsRequest())
    assert 1000 < len(caught.value.message) < 1_000_000


async def test_messages_beyond_four_megabytes_pass() -> None:
    data = bytes(5 * 1024 * 1024)

    async def large(*_: Any) -> AsyncIterator[pb.Chunk]:
        yield pb.Chunk(data=data)

    async with decode_stub(Decode(asset=large)) as stub:
        [chunk] = [chunk async for chunk in stub.GetAsset(pb.AssetRequest())]
    assert chunk.data == data


async def test_a_unary_call_without_a_deadline_gets_one_on_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: Any) -> pb.StatsReply:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(interceptors, "DEFAULT_TIMEOUT_SECONDS", 0.05)
    server = GrpcServer("127.0.0.1:0", lambda s: add_WorkerServiceServicer_to_server(Decode(stats=never), s), [DECODE])
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = WorkerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Stats(pb.StatsRequest())
    await server.stop(0)
    error = call_error(caught.value)
    assert type(error) is errors.DeadlineExceeded
    assert "/tandem.v1.WorkerService/Stats" in error.message


async def test_a_unary_call_without_a_timeout_gets_one_on_the_client() -> None:
    remaining: list[float] = []

    async def note(context: Any) -> pb.StatsReply:
        remaining.append(context.time_remaining())
        return pb.StatsReply()

    async with decode_stub(Decode(stats=note)) as stub:
        await stub.Stats(pb.StatsRequest())
        await stub.Stats(pb.StatsRequest(), timeout=5)
    rounding = 1  # gRPC rounds timeouts up on the wire
    assert 5 + rounding < remaining[0] <= calls.DEFAULT_TIMEOUT_SECONDS + rounding
    assert 0 < remaining[1] <= 5 + rounding


async def test_a_deadline_that_passes_is_a_typed_error() -> None:
    async def never(_: Any) -> pb.StatsReply:
        await asyncio.Event().wait()
        raise AssertionError

    async with decode_stub(Decode(stats=never)) as stub:
        with pytest.raises(errors.DeadlineExceeded):
            await stub.Stats(pb.StatsRequest(), timeout=0.05)


async def test_nobody_listening_is_unavailable() -> None:
    server = GrpcServer("127.0.0.1:0", lambda _: None, [])
    address = await server.start()
    await server.stop(0)
    async with open_channel(address) as channel:
        stub: Any = WorkerServiceStub(channel)
        with pytest.raises(errors.Unavailable):
            await stub.Stats(pb.StatsRequest(), timeout=10)
        with pytest.raises(errors.Unavailable):
            await stub.GetAsset(pb.AssetRequest(), timeout=10).read()


async def test_the_request_id_of_the_caller_is_in_the_logs_of_the_server() -> None:
    seen: list[str] = []

    async def note(_: Any) -> pb.StatsReply:
        seen.append(log.request_id())
        return pb.StatsReply()

    async with decode_stub(Decode(stats=note)) as stub:
        with log.bound(request_id="req-7"):
            await stub.Stats(pb.StatsRequest())
        await stub.Stats(pb.StatsRequest())
    assert seen == ["req-7", ""]
