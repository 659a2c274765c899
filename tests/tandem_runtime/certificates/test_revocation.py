"""What a revoked process has open is closed at once, in both directions, and on sockets too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem.v1.control_plane_pb2_grpc import ControlPlaneServiceServicer, add_ControlPlaneServiceServicer_to_server
from tandem.v1.tables_pb2 import TablesRequest
from tandem.v1.worker_pb2_grpc import WorkerServiceStub
from tandem_runtime.certificates.deny_list import MAX_DENIED, DenyList
from tandem_runtime.certificates.names import Identity
from tandem_runtime.certificates.peers import Peers
from tandem_runtime.channel import open_channel, open_worker_channel
from tandem_runtime.errors import InternalError, PeerUnauthenticated, TandemError, Unavailable
from tandem_runtime.registration import Registrar
from tandem_runtime.server import GrpcServer
from tests.certificates import Authority, new_id
from tests.tandem_runtime.certificates.worker import Worker, serving

HELLO = pb.Command(hello=pb.AttachHello(gateway_id="g"))
FLEET = "0" * 16
CUT_SECONDS = 2.0


async def _running(worker: Worker, num: int) -> None:
    async with asyncio.timeout(CUT_SECONDS):
        while worker.num_running != num:  # noqa: ASYNC110 - the condition depends on gRPC
            await asyncio.sleep(0.005)


async def test_a_server_cuts_every_kind_of_call_of_a_revoked_caller(tmp_path: Path) -> None:
    authority, worker = Authority(), Worker()
    server = authority.member(tmp_path, "decode")
    revoked, other = authority.member(tmp_path, "gateway"), authority.member(tmp_path, "gateway")
    async with (
        serving(worker, server) as address,
        open_channel(address, revoked, server.identity) as channel,
        open_channel(address, other, server.identity) as others,
    ):
        stub: Any = WorkerServiceStub(channel)
        kept: Any = WorkerServiceStub(others).Attach()
        attach, unread, waiting = stub.Attach(), stub.GetAsset(pb.AssetRequest()), stub.Tables(TablesRequest())
        for stream in (kept, attach):
            await stream.write(HELLO)
            await stream.read()
        answer = asyncio.ensure_future(_result(waiting))
        await _running(worker, 4)  # the asset's stream waits for a reader: the server is blocked inside gRPC
        server.denied.apply(1, [revoked.identity.id])
        await _running(worker, 1)
        with pytest.raises(PeerUnauthenticated, match=f"gateway {revoked.identity.id} is revoked"):
            await attach.read()
        assert isinstance(await answer, PeerUnauthenticated)
        with pytest.raises(TandemError):
            while True:
                await unread.read()
        await kept.write(HELLO)
        assert (await kept.read()).hello.gateway_id == "g"
        kept.cancel()
        await _running(worker, 0)
        assert server.peers.num_open == 0


async def _result(call: Any) -> Any:
    try:
        return await call
    except TandemError as error:
        return error


async def test_a_caller_cuts_its_calls_to_a_revoked_server_and_makes_no_new_ones(tmp_path: Path) -> None:
    authority, worker = Authority(), Worker()
    server, client = authority.member(tmp_path, "decode"), authority.member(tmp_path, "gateway")
    async with serving(worker, server) as address, open_channel(address, client, server.identity) as channel:
        stub: Any = WorkerServiceStub(channel)
        attach, waiting = stub.Attach(), asyncio.ensure_future(_result(stub.Tables(TablesRequest())))
        await attach.write(HELLO)
        await attach.read()
        reading = asyncio.ensure_future(_result(attach.read()))
        await _running(worker, 2)
        client.denied.apply(7, [server.identity.id])
        for result in await asyncio.gather(reading, waiting):
            assert isinstance(result, PeerUnauthenticated)
        await _running(worker, 0)
        with pytest.raises(PeerUnauthenticated, match="is revoked"):
            await stub.Stats(pb.StatsRequest())
        assert worker.serials == []
    assert client.peers.num_open == 0


async def test_a_waiting_task_that_is_cancelled_stays_cancelled(tmp_path: Path) -> None:
    authority, worker = Authority(), Worker()
    server, client = authority.member(tmp_path, "decode"), authority.member(tmp_path, "gateway")
    async with serving(worker, server) as address, open_channel(address, client, server.identity) as channel:
        stub: Any = WorkerServiceStub(channel)
        waiting = asyncio.ensure_future(_result(stub.Tables(TablesRequest())))
        await _running(worker, 1)
        waiting.cancel()
        client.denied.apply(1, [server.identity.id])
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_channel_to_a_worker_without_a_certificate_is_refused_by_name(tmp_path: Path) -> None:
    member = Authority().member(tmp_path, "gateway")
    info = pb.WorkerInfo(worker_id="decode-host-12", role=pb.WORKER_ROLE_DECODE, address="10.0.0.1:5")
    with pytest.raises(Unavailable, match=r"'decode-host-12' has registered without a certificate.*10\.0\.0\.1:5"):
        open_worker_channel(info, member)


class _ControlPlane(ControlPlaneServiceServicer):
    """Revokes one process in its first reply, and keeps what heartbeats say of the list."""

    def __init__(self, revoked: Identity) -> None:
        self.numbers: asyncio.Queue[int] = asyncio.Queue()
        self._list = cp.DenyList(number=3, ids=[revoked.id])

    async def Register(self, request: cp.RegisterRequest, context: Any) -> cp.RegisterReply:
        self.numbers.put_nowait(request.deny_list_number)
        return cp.RegisterReply(heartbeat_interval_ms=10, deny_list=self._list)

    async def Heartbeats(
        self, requests: AsyncIterator[cp.HeartbeatRequest], context: Any
    ) -> AsyncIterator[cp.HeartbeatReply]:
        async for request in requests:
            yield await self.Heartbeat(request, context)

    async def Heartbeat(self, request: cp.HeartbeatRequest, context: Any) -> cp.HeartbeatReply:
        self.numbers.put_nowait(request.deny_list_number)
        return cp.HeartbeatReply(known=True)

    async def Deregister(self, request: cp.DeregisterRequest, context: Any) -> cp.DeregisterReply:
        return cp.DeregisterReply()

    async def ListWorkers(self, request: cp.ListWorkersRequest, context: Any) -> cp.ListWorkersReply:
        return cp.ListWorkersReply()


async def test_a_reply_to_a_heartbeat_brings_the_list_and_its_number_goes_back(tmp_path: Path) -> None:
    authority = Authority()
    gateway, worker = authority.member(tmp_path, "gateway"), authority.member(tmp_path, "decode")
    revoked = authority.identity("prefill")
    control = _ControlPlane(revoked)

    def register(server: Any) -> None:
        add_ControlPlaneServiceServicer_to_server(control, server)

    server = GrpcServer("127.0.0.1:0", register, ["tandem.v1.ControlPlaneService"], member=gateway)
    info = pb.WorkerInfo(worker_id=worker.identity.id, incarnation="a", role=pb.WORKER_ROLE_DECODE)
    registrar = Registrar([await server.start()], info, pb.LoadReport, member=worker)
    registrar.start()
    async with asyncio.timeout(10):
        assert [await control.numbers.get() for _ in range(2)] == [0, 3]
    assert revoked in worker.denied and worker.denied.number == 3
    await registrar.stop()
    await server.stop(0)


def _identity(fleet: str = FLEET) -> Identity:
    return Identity(fleet, "kv", new_id())


def test_a_list_that_comes_late_or_twice_changes_nothing() -> None:
    denied, told = DenyList(), list[frozenset[str]]()
    denied.listen(told.append)
    first, second = _identity(), _identity()
    denied.apply(2, [first.id, second.id])
    denied.apply(1, [first.id])
    denied.apply(2, [first.id, second.id])
    denied.apply(2, [])
    assert denied.number == 2 and told == [frozenset({first.id, second.id})]
    assert first in denied and second in denied and _identity() not in denied


def test_the_list_has_a_bound() -> None:
    denied = DenyList()
    denied.apply(1, [f"spiffe://{'0' * 16}/kv/{number:016x}" for number in range(MAX_DENIED + 5)])
    assert len(denied) == MAX_DENIED


def test_one_close_that_fails_does_not_keep_the_others_open() -> None:
    denied, closed = DenyList(), list[TandemError]()
    peers, identity = Peers(FLEET, denied), _identity()

    def fails(_: TandemError) -> None:
        raise InternalError("cannot close")

    peers.accepted(identity, fails)
    peers.dialled(identity, closed.append)
    ended = peers.accepted(identity, closed.append)
    ended.end()
    ended.end()
    denied.apply(1, [identity.id])
    assert len(closed) == 1 and "is revoked" in closed[0].message
    assert peers.num_open == 0
