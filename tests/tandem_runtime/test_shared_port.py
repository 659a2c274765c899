"""A server's address takes TLS and plain text until the set time, and passes every byte on."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem.v1.control_plane_pb2_grpc import (
    ControlPlaneServiceServicer,
    ControlPlaneServiceStub,
    add_ControlPlaneServiceServicer_to_server,
)
from tandem_runtime import shared_port
from tandem_runtime.certificates.access import RULES, check_plaintext, is_in_plaintext
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.plaintext import Plaintext
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import InvalidRequest, PermissionDenied, TandemError, Unavailable
from tandem_runtime.server import GrpcServer
from tandem_runtime.shared_port import SharedPort, true_peer
from tests.certificates import Authority, new_id
from tests.tandem_runtime.serving import serving

pytestmark = pytest.mark.usefixtures("runtime_dir")

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CLIENT_HELLO = b"\x16\x03\x01"


class _Gateway(ControlPlaneServiceServicer):
    """Notes who registers."""

    def __init__(self) -> None:
        self.peers: list[tuple[str, bool]] = []

    async def Register(self, request: cp.RegisterRequest, context: Any) -> cp.RegisterReply:
        self.peers.append((true_peer(context.peer()), is_in_plaintext()))
        return cp.RegisterReply()

    async def Heartbeats(
        self, requests: AsyncIterator[cp.HeartbeatRequest], context: Any
    ) -> AsyncIterator[cp.HeartbeatReply]:
        async for request in requests:
            yield await self.Heartbeat(request, context)

    async def Heartbeat(self, request: cp.HeartbeatRequest, context: Any) -> cp.HeartbeatReply:
        return cp.HeartbeatReply(known=True)

    async def Deregister(self, request: cp.DeregisterRequest, context: Any) -> cp.DeregisterReply:
        return cp.DeregisterReply()

    async def ListWorkers(self, request: cp.ListWorkersRequest, context: Any) -> cp.ListWorkersReply:
        return cp.ListWorkersReply()


@asynccontextmanager
async def _serving(member: FleetMember | None, listen: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, _Gateway]]:
    gateway = _Gateway()

    def register(server: grpc.aio.Server) -> None:
        add_ControlPlaneServiceServicer_to_server(gateway, server)

    async with serving(register, "tandem.v1.ControlPlaneService", member, listen) as address:
        yield address, gateway


def _register(worker_id: str) -> cp.RegisterRequest:
    return cp.RegisterRequest(info=pb.WorkerInfo(worker_id=worker_id, role=pb.WORKER_ROLE_DECODE))


async def _health(address: str, member: FleetMember | None) -> int:
    async with open_channel(address, member, "gateway") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "unix"])
async def test_one_address_answers_over_tls_and_in_plain_text(tmp_path: Path, listen: str) -> None:
    authority, soon = Authority(), time.time() + 3600
    member = authority.member(tmp_path, "gateway", plaintext_until=soon)
    worker = authority.member(tmp_path, "decode")
    listen = f"unix:{tmp_path}/grpc.sock" if listen == "unix" else listen
    async with _serving(member, listen) as (address, gateway):
        async with open_channel(address) as plain, open_channel(address, worker, "gateway") as encrypted:
            await ControlPlaneServiceStub(plain).Register(_register("decode-host-7"))
            await ControlPlaneServiceStub(encrypted).Register(_register(worker.identity.id))
        assert [is_plain for _, is_plain in gateway.peers] == [True, False]
        kind = "unix" if listen.startswith("unix") else "ipv4:127.0.0.1:"
        assert all(peer.startswith((kind, "ipv6:[::1]:")) for peer, _ in gateway.peers)
    with pytest.raises(Unavailable):
        await _health(address, None)


async def test_an_address_in_use_is_refused_by_name(tmp_path: Path) -> None:
    member = Authority().member(tmp_path, "gateway", plaintext_until=time.time() + 3600)
    async with _serving(member) as (address, _):
        with pytest.raises(InvalidRequest, match="is the port taken"):
            await GrpcServer(address, lambda _: None, [], member=member).start()


async def test_who_calls_in_plain_text_takes_no_id_of_a_certificate(tmp_path: Path) -> None:
    member = Authority().member(tmp_path, "gateway", plaintext_until=time.time() + 3600)
    async with _serving(member) as (address, gateway), open_channel(address) as plain:
        stub = ControlPlaneServiceStub(plain)
        with pytest.raises(PermissionDenied, match="is that of a certificate"):
            await stub.Register(_register(new_id()))
        with pytest.raises(PermissionDenied, match="is that of a certificate"):
            await stub.Heartbeat(cp.HeartbeatRequest(worker_id=member.identity.id))
        with pytest.raises(PermissionDenied, match="may not be called in plain text"):
            await stub.ListWorkers(cp.ListWorkersRequest())
        assert gateway.peers == []


def test_in_plain_text_each_method_is_allowed_that_processes_of_a_fleet_call() -> None:
    refused = set()
    for method in RULES:
        try:
            check_plaintext(method)
        except PermissionDenied:
            refused.add(method.rpartition("/")[2])
    assert refused == {"ListWorkers", "Stats", "Enrol", "Renew", "ServerReflectionInfo"}


async def test_at_the_set_time_plain_connections_are_closed_and_those_over_tls_go_on(tmp_path: Path) -> None:
    authority = Authority()
    now = time.time()
    member = authority.member(tmp_path, "gateway", plaintext_until=now + 3600)
    worker = authority.member(tmp_path, "decode")
    clock = [now]
    member.plaintext = Plaintext(now + 0.5, clock=lambda: clock[0])
    async with (
        _serving(member) as (address, _),
        open_channel(address) as plain,
        open_channel(address, worker, "gateway") as encrypted,
    ):
        watches: list[Any] = [
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()) for channel in (plain, encrypted)
        ]
        for watch in watches:
            await watch.read()
        clock[0] = now + 1  # the timer looks at the clock after half a second
        with pytest.raises(TandemError):
            await watches[0].read()
        with pytest.raises(Unavailable):
            await _health(address, None)
        assert await _health(address, worker) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not watches[1].done()
        watches[1].cancel()


async def test_without_the_setting_plain_text_is_refused_as_ever(tmp_path: Path) -> None:
    for until in (0.0, time.time() - 1):
        async with _serving(Authority().member(tmp_path, "gateway", plaintext_until=until)) as (address, _):
            with pytest.raises(Unavailable):
                await _health(address, None)


# ------------------------------------------------------------------------------------------------------- the relay


@asynccontextmanager
async def _relaying(tls: Serve, plain: Serve) -> AsyncIterator[tuple[SharedPort, int]]:
    """Relay to two servers that are no gRPC servers."""
    port = SharedPort(Plaintext(time.time() + 3600))
    servers = [
        await asyncio.start_unix_server(serve, path) for serve, path in ((tls, port.tls_path), (plain, port.plain_path))
    ]
    try:
        yield port, await port.listen("127.0.0.1", 0)
    finally:
        await port.close()
        for server in servers:
            server.close()
        assert not port.tls_path.parent.exists()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


async def _nobody(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    raise AssertionError("a connection came to the wrong server")


@pytest.mark.parametrize("first", [CLIENT_HELLO, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_the_first_byte_chooses_the_server_and_every_byte_arrives(first: bytes) -> None:
    sent = first + random.Random(1).randbytes(4 << 20)
    servers = (_echo, _nobody) if first == CLIENT_HELLO else (_nobody, _echo)
    async with _relaying(*servers) as (port, number):
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent
        assert port.num_plain == int(first != CLIENT_HELLO)
        writer.write_eof()
        assert await reader.read() == b""  # the end of one direction ends the connection
        writer.close()


async def test_a_server_that_does_not_read_stops_its_client() -> None:
    may_read = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await may_read.wait()
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        await _echo(reader, writer)

    async with _relaying(slow, _nobody) as (_, number):
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        sent = CLIENT_HELLO + bytes(64 << 20)
        writer.write(sent)
        with pytest.raises(TimeoutError):  # 64 MiB do not fit between the two
            await asyncio.wait_for(writer.drain(), 0.3)
        may_read.set()
        assert len(await reader.readexactly(len(sent))) == len(sent)
        writer.close()


async def test_a_connection_that_sends_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_port, "FIRST_BYTE_SECONDS", 0.05)
    async with _relaying(_nobody, _nobody) as (_, number):
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        assert await _is_closed(reader)
        writer.close()


async def test_of_one_address_only_so_many_connections_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_port, "MAX_SILENT", 2)
    async with _relaying(_echo, _nobody) as (_, number):
        connections = [await asyncio.open_connection("127.0.0.1", number) for _ in range(3)]
        assert await _is_closed(connections[2][0])
        reader, writer = connections[0]
        writer.write(CLIENT_HELLO)
        assert await reader.readexactly(3) == CLIENT_HELLO
        reader, late = await asyncio.open_connection("127.0.0.1", number)  # one has spoken, so there is room for one
        late.write(CLIENT_HELLO)
        assert await reader.readexactly(3) == CLIENT_HELLO
        for _, writer in [*connections, (reader, late)]:
            writer.close()


async def test_a_connection_that_the_server_refuses_is_closed() -> None:
    port = SharedPort(Plaintext(time.time() + 3600))
    number = await port.listen("127.0.0.1", 0)  # nobody listens behind
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(CLIENT_HELLO)
        assert await _is_closed(reader)
        writer.close()
    finally:
        await port.close()


@pytest.mark.parametrize(
    ("peer", "true"),
    [
        ("unix-abstract:tandem-relay/0123456789abcdef/ipv4:10.1.2.3:4567", "ipv4:10.1.2.3:4567"),
        ("unix-abstract:tandem-relay%2F0123456789abcdef%2Fipv6:%5Bfd00::1%5D:4567", "ipv6:[fd00::1]:4567"),
        ("ipv4:10.1.2.3:4567", "ipv4:10.1.2.3:4567"),
        ("unix-abstract:somebody/else/ipv4:10.1.2.3:4567", "unix-abstract:somebody/else/ipv4:10.1.2.3:4567"),
    ],
)
def test_the_name_of_a_relayed_connection_tells_the_peer(peer: str, true: str) -> None:
    assert true_peer(peer) == true
