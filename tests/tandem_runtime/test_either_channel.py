"""A client calls a server of release 0.2 in plain text until the set time, and no other server ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.v1 import types_pb2 as pb
from tandem.v1.worker_pb2_grpc import WorkerServiceServicer, WorkerServiceStub, add_WorkerServiceServicer_to_server
from tandem_runtime.certificates import plaintext
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.plaintext import Plaintext
from tandem_runtime.channel import open_channel, open_worker_channel
from tandem_runtime.errors import DeadlineExceeded, Unavailable
from tests.certificates import Authority
from tests.tandem_runtime.serving import serving

pytestmark = pytest.mark.usefixtures("runtime_dir")


class _Worker(WorkerServiceServicer):
    """Answers each kind of call, and notes which connections were encrypted."""

    def __init__(self) -> None:
        self.encrypted: list[bool] = []

    async def Drain(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Stats(self, request: Any, context: Any) -> pb.StatsReply:
        self.encrypted.append("x509_pem_cert" in context.auth_context())
        return pb.StatsReply()

    async def Attach(self, requests: AsyncIterator[pb.Command], context: Any) -> AsyncIterator[pb.Event]:
        async for command in requests:
            yield pb.Event(hello=pb.AttachHello(worker_incarnation=command.hello.gateway_id))

    async def GetAsset(self, request: Any, context: Any) -> AsyncIterator[pb.Chunk]:
        context.set_trailing_metadata((("sum", "6"),))
        for offset in range(3):
            yield pb.Chunk(offset=offset)

    async def Tables(self, request: Any, context: Any) -> Any:
        await asyncio.Event().wait()


@asynccontextmanager
async def _serving(member: FleetMember | None, listen: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, _Worker]]:
    worker = _Worker()

    def register(server: grpc.aio.Server) -> None:
        add_WorkerServiceServicer_to_server(worker, server)

    async with serving(register, "tandem.v1.WorkerService", member, listen) as address:
        yield address, worker


def _gateway(authority: Authority, folder: Path) -> FleetMember:
    return authority.member(folder, "gateway", plaintext_until=time.time() + 3600)


async def test_every_kind_of_call_reaches_a_server_of_release_0_2(tmp_path: Path) -> None:
    member = _gateway(Authority(), tmp_path)
    async with _serving(None) as (address, worker), open_channel(address, member, "decode") as channel:
        stub: Any = WorkerServiceStub(channel)
        await stub.Stats(pb.StatsRequest())
        assert worker.encrypted == [False]

        chunks = stub.GetAsset(pb.AssetRequest())
        assert [chunk.offset async for chunk in chunks] == [0, 1, 2]
        assert ("sum", "6") in tuple(await chunks.trailing_metadata())

        attach = stub.Attach()
        for name in ("first", "second"):
            await attach.write(pb.Command(hello=pb.AttachHello(gateway_id=name)))
            assert (await attach.read()).hello.worker_incarnation == name
        attach.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attach.read()


async def test_a_call_ends_with_its_owner_and_at_its_deadline(tmp_path: Path) -> None:
    member = _gateway(Authority(), tmp_path)
    async with _serving(None) as (address, _), open_channel(address, member, "decode") as channel:
        stub: Any = WorkerServiceStub(channel)
        with pytest.raises(DeadlineExceeded):
            await stub.Tables(pb.StatsRequest(), timeout=0.2)
        never_started = stub.Tables(pb.StatsRequest())
        never_started.cancel()
        with pytest.raises(asyncio.CancelledError):
            await never_started


async def test_a_replaced_server_is_called_over_tls_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plaintext, "PLAIN_SECONDS", 0.0)
    authority = Authority()
    member = _gateway(authority, tmp_path)
    async with _serving(None) as (address, old):
        channel = open_channel(address, member, "decode")
        stub: Any = WorkerServiceStub(channel)
        await stub.Stats(pb.StatsRequest())
    new_member = authority.member(tmp_path, "decode", plaintext_until=time.time() + 3600)
    async with _serving(new_member, address) as (_, new):
        await _until_answered(stub)
        await stub.Stats(pb.StatsRequest())
        assert old.encrypted == [False]
        assert new.encrypted == [True, True]
    async with _serving(None, address) as (_, rolled_back):  # or somebody who pretends to be of the old release
        with pytest.raises(Unavailable):
            await stub.Stats(pb.StatsRequest(), timeout=3)
        assert rolled_back.encrypted == []
    await channel.close()


async def _until_answered(stub: Any) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await stub.Stats(pb.StatsRequest())
                return
            except Unavailable:
                continue


async def test_after_the_set_time_nothing_is_sent_in_plain_text(tmp_path: Path) -> None:
    member = _gateway(Authority(), tmp_path)
    async with _serving(None) as (address, worker), open_channel(address, member, "decode") as channel:
        stub: Any = WorkerServiceStub(channel)
        await stub.Stats(pb.StatsRequest())
        member.plaintext = Plaintext(time.time() - 1)
        with pytest.raises(Unavailable):
            await stub.Stats(pb.StatsRequest(), timeout=3)
        assert len(worker.encrypted) == 1


async def test_nobody_is_called_who_answers_as_neither(tmp_path: Path) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    member = _gateway(Authority(), tmp_path)
    stranger = await asyncio.start_server(talk, "127.0.0.1", 0)
    address = f"127.0.0.1:{stranger.sockets[0].getsockname()[1]}"
    async with open_channel(address, member, "decode") as channel:
        stub: Any = WorkerServiceStub(channel)
        with pytest.raises(Unavailable, match="neither over TLS nor as a gRPC server"):
            await stub.Stats(pb.StatsRequest())
        stranger.close()
        await stranger.wait_closed()
        with pytest.raises(Unavailable, match="cannot connect"):
            await stub.Stats(pb.StatsRequest())


async def test_a_server_that_answers_nothing_is_left_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plaintext, "PROBE_SECONDS", 0.1)
    held: list[asyncio.StreamWriter] = []  # a writer that nobody holds closes its connection
    silent = await asyncio.start_server(lambda reader, writer: held.append(writer), "127.0.0.1", 0)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    with pytest.raises(Unavailable, match="has not answered within"):
        await Plaintext(time.time() + 3600).takes_tls(address)
    for writer in held:
        writer.close()
    silent.close()


async def test_a_worker_with_an_id_of_a_certificate_is_never_called_in_plain_text(tmp_path: Path) -> None:
    authority = Authority()
    gateway = _gateway(authority, tmp_path)
    async with _serving(None) as (address, worker):
        old = pb.WorkerInfo(worker_id="decode-host-7", role=pb.WORKER_ROLE_DECODE, address=address)
        async with open_worker_channel(old, gateway) as channel:
            stub: Any = WorkerServiceStub(channel)
            await stub.Stats(pb.StatsRequest())
        new = pb.WorkerInfo(worker_id=authority.identity("decode").id, role=pb.WORKER_ROLE_DECODE, address=address)
        async with open_worker_channel(new, gateway) as channel:
            stub = WorkerServiceStub(channel)
            with pytest.raises(Unavailable):
                await stub.Stats(pb.StatsRequest(), timeout=3)
        assert worker.encrypted == [False]
        gateway.plaintext = Plaintext(time.time() - 1)
        with pytest.raises(Unavailable, match="registered without a certificate"):
            open_worker_channel(old, gateway)
