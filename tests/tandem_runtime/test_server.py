"""A server listens only where it may, and reports its identity and health."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2
from tandem.v1.tables_pb2 import TablesReply
from tandem.v1.worker_pb2_grpc import WorkerServiceServicer, WorkerServiceStub, add_WorkerServiceServicer_to_server
from tandem_runtime import errors
from tandem_runtime.channel import open_channel
from tandem_runtime.message_sizes import SERVICES
from tandem_runtime.server import GrpcServer, is_loopback, split_address

DECODE = "tandem.v1.WorkerService"


async def test_health_follows_set_serving_under_each_name() -> None:
    server = GrpcServer("127.0.0.1:0", lambda _: None, [DECODE])
    async with open_channel(await server.start()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", DECODE):
            assert await _health(stub, name) == health_pb2.HealthCheckResponse.NOT_SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=DECODE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        server.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        server.set_serving(False)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        with pytest.raises(errors.TandemError):
            await _health(stub, "tandem.v1.Nothing")
    await server.stop(0)


async def _health(stub: Any, name: str) -> int:
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)


async def test_reflection_names_the_services_and_describes_them() -> None:
    assert worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name == DECODE
    server = GrpcServer("127.0.0.1:0", lambda _: None, [DECODE], has_reflection=True)
    async with open_channel(await server.start()) as channel:
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflection.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {DECODE, "grpc.health.v1.Health"} <= names
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=DECODE))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        call.cancel()
    await server.stop(0)


async def test_a_server_describes_itself_only_where_it_is_asked_for() -> None:
    server = GrpcServer("127.0.0.1:0", lambda _: None, [DECODE])
    async with open_channel(await server.start()) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        with pytest.raises(errors.Unsupported):
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            await call.read()
    await server.stop(0)


class _Worker(WorkerServiceServicer):
    def __init__(self, reply_bytes: int = 0) -> None:
        self._reply_bytes = reply_bytes

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[pb.Event]:
        async for command in requests:
            tokens = len(command.submit.token_ids)
            yield pb.Event(hello=pb.AttachHello(gateway_id=str(tokens)))

    async def Drain(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def GetAsset(self, request: Any, context: Any) -> AsyncIterator[pb.Chunk]:
        yield pb.Chunk(data=bytes(self._reply_bytes))

    async def Stats(self, request: Any, context: Any) -> pb.StatsReply:
        return pb.StatsReply()

    async def Tables(self, request: Any, context: Any) -> TablesReply:
        return TablesReply()


async def test_a_message_has_a_bound_in_both_directions_and_a_prompt_of_ten_million_tokens_fits() -> None:
    sizes = SERVICES[DECODE]
    servicer = _Worker(sizes.reply_bytes + 1)
    server = GrpcServer("127.0.0.1:0", lambda s: add_WorkerServiceServicer_to_server(servicer, s), [DECODE])
    async with open_channel(await server.start()) as channel:
        stub: Any = WorkerServiceStub(channel)
        prompt = pb.Submit(token_ids=[151_000] * 10_000_000, block_hashes=[bytes(16)] * 625_000)
        call = stub.Attach()
        await call.write(pb.Command(submit=prompt))
        assert (await call.read()).hello.gateway_id == "10000000"
        call.cancel()
        with pytest.raises(errors.Overloaded, match="larger than max"):
            await stub.GetAsset(pb.AssetRequest()).read()
        with pytest.raises(errors.Overloaded, match="larger than max"):
            await stub.GetAsset(pb.AssetRequest(digest=bytes(sizes.request_bytes + 1))).read()
    await server.stop(0)


async def test_a_unix_socket_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    server = GrpcServer(f"unix:{path}", lambda _: None, [DECODE])
    assert await server.start() == f"unix:{path}"
    assert path.stat().st_mode & 0o777 == 0o600
    async with open_channel(f"unix:{path}") as channel:
        assert await _health(health_pb2_grpc.HealthStub(channel), "") == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop(0)


async def test_two_servers_never_share_a_port() -> None:
    first = GrpcServer("127.0.0.1:0", lambda _: None, [])
    address = await first.start()
    with pytest.raises(errors.InvalidRequest, match="cannot listen on"):
        await GrpcServer(address, lambda _: None, []).start()
    await first.stop(0)


async def test_listening_beyond_loopback_must_be_said_aloud() -> None:
    with pytest.raises(errors.InvalidRequest, match="--insecure"):
        await GrpcServer("0.0.0.0:0", lambda _: None, []).start()
    with pytest.raises(errors.InvalidRequest, match="--insecure"):
        await GrpcServer("[::]:0", lambda _: None, []).start()
    server = GrpcServer("localhost:0", lambda _: None, [])
    assert (await server.start()).startswith("localhost:")
    await server.stop(0)


async def test_loopback_is_told_by_address_not_by_spelling() -> None:
    assert [await is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "[::1]", "localhost")] == [True] * 4
    assert [await is_loopback(host) for host in ("10.0.0.1", "0.0.0.0", "[::]")] == [False] * 3


def test_an_address_needs_host_and_port() -> None:
    assert split_address("[::1]:80") == ("[::1]", 80)
    for wrong in ("8643", ":8643", "host", "host:", "host:http", "host:70000"):
        with pytest.raises(errors.InvalidRequest, match="host:port"):
            split_address(wrong)
