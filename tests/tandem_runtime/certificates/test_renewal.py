"""A renewal is used by the next call, and breaks none that runs."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.v1 import types_pb2 as pb
from tandem.v1.worker_pb2_grpc import WorkerServiceStub
from tandem_runtime.calls import TracedChannel
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import PeerUnauthenticated
from tandem_runtime.renewed_channel import RenewedChannel
from tests.certificates import Authority
from tests.loop_turns import counted_turns
from tests.tandem_runtime.certificates.worker import Worker, serving

HELLO = pb.Command(hello=pb.AttachHello(gateway_id="g"))


def _renewed(channel: Any) -> RenewedChannel:
    assert isinstance(channel, TracedChannel)
    assert isinstance(channel._channel, RenewedChannel)
    return channel._channel


async def _until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition depends on gRPC
            await asyncio.sleep(0.005)


async def test_the_server_sees_the_new_serial_and_the_old_stream_goes_on(tmp_path: Path) -> None:
    authority, worker = Authority(), Worker()
    server, client = authority.member(tmp_path, "decode"), authority.member(tmp_path, "gateway")
    async with (
        serving(worker, server) as address,
        open_channel(address, client, server.identity) as channel,
        open_channel(address, client, server.identity) as neighbour,
    ):
        stub: Any = WorkerServiceStub(channel)
        serials = [client.certificate.current.serial]
        stream = stub.Attach()
        await stream.write(HELLO)
        await stream.read()
        await stub.Stats(pb.StatsRequest())
        for _ in range(2):
            serials.append(authority.renew(tmp_path, client))
            await stub.Stats(pb.StatsRequest())
            await stream.write(HELLO)
            assert (await stream.read()).hello.gateway_id == "g"
        assert worker.serials == serials
        assert _renewed(channel).num_connections == 2  # the first, for the stream, and the last
        await WorkerServiceStub(neighbour).Stats(pb.StatsRequest())
        assert worker.serials[-1] == serials[-1]
        await stream.done_writing()
        await _until(lambda: worker.num_running == 0)
        stream.cancel()
        await _until(lambda: _renewed(channel).num_connections == 1)


class _Clock:
    def __init__(self) -> None:
        self.ahead_seconds = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_seconds


async def test_a_stream_outlives_its_certificate_if_the_caller_has_renewed(tmp_path: Path) -> None:
    authority, worker, clock = Authority(), Worker(), _Clock()
    held = authority.member(tmp_path, "decode").certificate
    server, client = FleetMember(held, elapsed=clock), authority.member(tmp_path, "gateway", seconds=100)
    async with (
        serving(worker, server) as address,
        open_channel(address, client, server.identity) as channel,
        open_channel(address, late := authority.member(tmp_path, "gateway", seconds=100), server.identity) as idle,
    ):
        streams: list[Any] = [WorkerServiceStub(channel).Attach(), WorkerServiceStub(idle).Attach()]
        for stream in streams:
            await stream.write(HELLO)
            await stream.read()
        shown = server.peers._seen[client.identity.id]
        before = len(shown)
        authority.renew(tmp_path, client, seconds=1000)
        # By the holder's own call, not by one of ours:
        await _until(lambda: len(shown) > before)
        clock.ahead_seconds = 500
        server.peers.sweep()
        with pytest.raises(PeerUnauthenticated, match=f"certificate of gateway {late.identity.id} has expired"):
            await streams[1].read()
        with pytest.raises(PeerUnauthenticated, match="has expired"):  # the connection stands; the call is refused
            await WorkerServiceStub(idle).Stats(pb.StatsRequest())
        await streams[0].write(HELLO)
        assert (await streams[0].read()).hello.gateway_id == "g"
        clock.ahead_seconds = 2000
        server.peers.sweep()
        with pytest.raises(PeerUnauthenticated, match="has expired"):
            await streams[0].read()
        await _until(lambda: worker.num_running == 0)
        assert server.peers.num_open == 0


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_machines_clock_that_is_set_closes_no_stream_and_lengthens_none(tmp_path: Path, hours: int) -> None:
    authority, worker, date, elapsed = Authority(), Worker(), _Clock(), _Clock()
    held = authority.member(tmp_path, "decode").certificate
    server, client = FleetMember(held, clock=date, elapsed=elapsed), authority.member(tmp_path, "gateway", seconds=100)
    async with serving(worker, server) as address, open_channel(address, client, server.identity) as channel:
        stub: Any = WorkerServiceStub(channel)
        stream = stub.Attach()
        await stream.write(HELLO)
        await stream.read()
        date.ahead_seconds = hours * 3600
        server.peers.sweep()
        await stream.write(HELLO)
        assert (await stream.read()).hello.gateway_id == "g"
        await stub.Stats(pb.StatsRequest())
        elapsed.ahead_seconds = 101
        server.peers.sweep()
        with pytest.raises(PeerUnauthenticated, match="has expired"):
            await stream.read()
        with pytest.raises(PeerUnauthenticated, match="has expired"):
            await stub.Stats(pb.StatsRequest())
        await _until(lambda: worker.num_running == 0)


async def test_certificates_and_the_authority_change_under_load_and_no_call_fails(tmp_path: Path) -> None:
    old, worker = Authority(), Worker()
    new = Authority(old.fleet)
    server, client = old.member(tmp_path, "decode"), old.member(tmp_path, "gateway")
    both = old.bundle + new.bundle
    stop = asyncio.Event()

    async def load(stub: Any) -> int:
        num_calls = 0
        while not stop.is_set():
            await stub.Stats(pb.StatsRequest(), timeout=20)
            num_calls += 1
        return num_calls

    async with serving(worker, server) as address, open_channel(address, client, server.identity) as channel:
        stub: Any = WorkerServiceStub(channel)
        stream = stub.Attach()
        await stream.write(HELLO)
        await stream.read()
        callers = [asyncio.create_task(load(stub)) for _ in range(4)]
        serials = set()
        # Both are trusted before either issues; the old one leaves when nobody shows it any more.
        for authority, bundle in [(old, b""), (old, b""), (old, both), (new, both), (new, both), (new, new.bundle)]:
            for member in (server, client):
                authority.renew(tmp_path, member, bundle=bundle)
                num_seen = len(worker.serials)
                await _until(lambda num_seen=num_seen: len(worker.serials) > num_seen + 20)
            serials.add(client.certificate.current.serial)
        stop.set()
        assert all(await asyncio.gather(*callers))
        await stream.write(HELLO)
        assert (await stream.read()).hello.gateway_id == "g"
        stream.cancel()
    assert serials <= set(worker.serials)


async def test_the_channels_of_a_process_are_renewed_one_in_each_turn_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway has a channel to each of hundreds of workers, and to open one takes up to a millisecond."""
    authority = Authority()
    client = authority.member(tmp_path, "gateway")
    channels = [open_channel("127.0.0.1:1", client, authority.identity("decode")) for _ in range(50)]
    secure_channel, opened = grpc.aio.secure_channel, []

    def counted(*args: Any, **kwargs: Any) -> grpc.aio.Channel:
        opened.append(turns.now)
        return secure_channel(*args, **kwargs)

    monkeypatch.setattr(grpc.aio, "secure_channel", counted)
    with counted_turns() as turns:
        authority.renew(tmp_path, client)
        assert not opened
        closing = asyncio.create_task(channels[-1].close())  # before its turn: it is not renewed
        await _until(lambda: turns.now > 100)
        await closing
    assert len(opened) == len(set(opened)) == 49
    await asyncio.gather(*(channel.close() for channel in channels))


async def test_a_closed_channel_is_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    authority = Authority()
    client = authority.member(tmp_path, "gateway")

    async def renewed_and_closed() -> weakref.ref[RenewedChannel]:
        async with open_channel("127.0.0.1:1", client, authority.identity("decode")) as channel:
            renewed = _renewed(channel)
            authority.renew(tmp_path, client)
            await _until(lambda: renewed._connection.generation == client.certificate.current.generation)
            return weakref.ref(renewed)

    gc.collect()
    gc.disable()
    try:
        closed = await renewed_and_closed()
        await _until(lambda: closed() is None)
    finally:
        gc.enable()


async def test_a_role_is_enough_where_the_id_is_not_known(tmp_path: Path) -> None:
    authority, worker = Authority(), Worker()
    server, client = authority.member(tmp_path, "decode"), authority.member(tmp_path, "gateway")
    path = f"unix:{tmp_path}/w.sock"
    async with serving(worker, server, path) as address, open_channel(address, client, "decode") as channel:
        await WorkerServiceStub(channel).Stats(pb.StatsRequest())
        assert worker.serials == [client.certificate.current.serial]
