"""Data connections over TLS: encrypted, between KV services of one fleet only, and closed when one is revoked."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kv_transfer_svc.transport import frames
from kv_transfer_svc.transport.data_server import DataServer, OpenSource
from kv_transfer_svc.transport.interface import LinkBroken
from kv_transfer_svc.transport.pieces import groups
from kv_transfer_svc.transport.source import Source
from kv_transfer_svc.transport.tcp_transport import DataConnection
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import KvNotFound
from tandem_runtime.kv.checksum import block_checksum
from tests.kv_transfer_svc.host import Host, a_client, running_writer, until, watch_all
from tests.kv_transfer_svc.layout import BLOCK_BYTES
from tests.kv_transfer_svc.test_two_hosts import bytes_at
from tests.kv_transfer_svc.transport.fleet_certificates import Authority, Member
from tests.kv_transfer_svc.transport.harness import (
    TransferFault,
    a_request,
    everything_is_back,
    link_of,
    linked_host,
    proxied,
    sealed,
)

SLOTS = [5, 3, 8, 1]
MARK = b"a tenant's secret in the KV cache"


async def a_probe(host: Host, num_bytes: int = 3) -> kv.DataRequest:
    request = await a_request(host)
    request.probe.num_bytes = num_bytes
    return request


async def exchanged(host: Host, connection: DataConnection, num_bytes: int = 3) -> bytes:
    """Return what a probe over the connection brings."""
    buffer = bytearray(b"\1" * num_bytes)
    await asyncio.to_thread(connection.exchange, await a_probe(host, num_bytes), [memoryview(buffer)])
    return bytes(buffer)


async def dialled(host: Host, member: Member | None, holder: str = "") -> DataConnection:
    handshake = host.service.handshake
    return await DataConnection.connect(
        handshake.tcp_address, holder or handshake.identity, None if member is None else member.tls
    )


@pytest.mark.parametrize("is_encrypted", [True, False])
async def test_blocks_arrive_equal_and_only_in_plain_text_can_they_be_read_on_the_way(
    tmp_path: Path, is_encrypted: bool
) -> None:
    fleet = Authority()
    here_tls, there_tls = (fleet.member().tls if is_encrypted else None for _ in range(2))
    async with (
        linked_host(tmp_path, tls=here_tls) as (here, _),
        linked_host(tmp_path, tls=there_tls) as (there, _),
        proxied(there) as proxy,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        writer.region.view(5 * BLOCK_BYTES + 100, len(MARK))[:] = MARK
        handle = await sealed(writer, SLOTS)
        event, _ = await watch_all(reader, handle, "r")
        assert event.transport == "tcp"
        assert await bytes_at(here, event.slab) == b"".join(map(writer.block, SLOTS))
        assert len(proxy.seen) > len(SLOTS) * BLOCK_BYTES
        assert (MARK in proxy.seen) != is_encrypted
        assert (handle.handle_id in proxy.seen_of_reader) != is_encrypted
        await reader.release(handle, "r")
        await everything_is_back(here, there)


async def test_large_and_small_blocks_fill_whole_buffers(tmp_path: Path) -> None:
    """Pieces larger, smaller and much smaller than a TLS record, and their sums, in one connection."""
    fleet = Authority()
    reader, holder = fleet.member(), fleet.member()
    sizes = [[3 << 20], [40_000, 1, 20_000], [100] * 900, [16_384] * 3, []]

    @asynccontextmanager
    async def numbered(request: kv.DataRequest) -> AsyncIterator[Source]:
        yield Numbered(sizes[request.probe.num_bytes])

    async with linked_host(tmp_path, tls=holder.tls, open_source=numbered) as (host, data):
        connection = await dialled(host, reader)
        for number, size in enumerate(sizes):
            buffers = [bytearray(b"x" * each) for each in size]
            checksums = await asyncio.to_thread(
                connection.exchange, await a_probe(host, number), [memoryview(each) for each in buffers]
            )
            assert b"".join(buffers) == Numbered(size).content and len(checksums) == len(size)
            assert connection.is_usable and data.num_connections == 1
        connection.close()


class Numbered:
    """Blocks whose bytes differ by their place."""

    def __init__(self, sizes: list[int]) -> None:
        self.num_bytes = sum(sizes)
        self.content = bytes((index * 7 + index // 251) % 256 for index in range(self.num_bytes))
        self._sizes = sizes

    def __iter__(self) -> Iterator[list[memoryview]]:
        yield from groups(self._blocks())

    def _blocks(self) -> list[memoryview]:
        content, blocks = memoryview(self.content), []
        for size in self._sizes:
            blocks.append(content[:size])
            content = content[size:]
        return blocks

    def finish(self) -> list[int]:
        return [block_checksum(bytes(block)) for block in self._blocks()]


# ------------------------------------------------------------------------------------------------------- strangers


def strangers(fleet: Authority) -> dict[str, Member]:
    """Return processes that no data connection is for."""
    expired = fleet.member(seconds=-60.0)
    return {
        "of another fleet": Authority().member(),
        "of another fleet that names itself as ours": Authority(fleet.fleet).member(),
        "a prefill worker": fleet.member("prefill"),
        "a decode worker": fleet.member("decode"),
        "a gateway": fleet.member("gateway"),
        "expired": expired,
    }


@pytest.mark.parametrize("who", [*strangers(Authority()), "revoked", "without a certificate"])
async def test_a_stranger_reads_nothing_over_a_data_connection(tmp_path: Path, who: str) -> None:
    fleet = Authority()
    holder, right = fleet.member(), fleet.member()
    stranger = strangers(fleet).get(who, right)
    if who == "revoked":
        holder.peers.revoke(right.identity)
    async with linked_host(tmp_path, tls=holder.tls) as (host, data):
        context = stranger.context(False)
        if who == "without a certificate":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # it does not care who the holder is
        context.verify_mode = ssl.CERT_NONE
        address, _, port = host.service.handshake.tcp_address.rpartition(":")
        request = frames.packed(await a_probe(host, 1000))
        got = await asyncio.to_thread(_ask_as, context, address, int(port), request)
        assert got == b""
        await until(lambda: data.num_connections == 0)
        # and the right one still gets its answer
        if who != "revoked":
            connection = await dialled(host, right)
            assert await exchanged(host, connection) == bytes(3)
            connection.close()


def _ask_as(context: ssl.SSLContext, address: str, port: int, request: bytes) -> bytes:
    """Return what a client that checks nothing receives for its request."""
    with socket.create_connection((address, port), timeout=20) as sock:
        try:
            with context.wrap_socket(sock) as secured:
                secured.sendall(request)
                return secured.recv(4096)
        except OSError:
            return b""


@pytest.mark.parametrize("who", strangers(Authority()))
async def test_a_reader_takes_no_blocks_from_a_stranger(tmp_path: Path, who: str) -> None:
    fleet = Authority()
    reader, stranger = fleet.member(), strangers(fleet)[who]
    async with linked_host(tmp_path, tls=stranger.tls) as (host, _):
        with pytest.raises(LinkBroken, match=r"took no connection|named itself"):
            await dialled(host, reader)
    assert reader.peers.open == []


async def test_a_holder_with_another_id_than_openlink_named_is_not_read(tmp_path: Path) -> None:
    fleet = Authority()
    reader, expected, other = (fleet.member() for _ in range(3))
    async with linked_host(tmp_path, tls=other.tls) as (host, _):
        with pytest.raises(LinkBroken, match="took no connection"):
            await dialled(host, reader, expected.identity.uri)
        with pytest.raises(LinkBroken, match="named itself wrongly"):
            await dialled(host, reader, "spiffe://somebody")


async def test_plain_text_and_tls_do_not_mix_without_the_setting(tmp_path: Path) -> None:
    fleet = Authority()
    async with linked_host(tmp_path, tls=fleet.member().tls) as (host, data):
        with pytest.raises(LinkBroken, match="has no certificate"):
            await dialled(host, None)
        plain = await DataConnection.connect(host.service.handshake.tcp_address)  # a reader of release 0.2
        with pytest.raises(LinkBroken):
            await asyncio.to_thread(plain.exchange, await a_probe(host), [memoryview(bytearray(3))])
        plain.close()
        await until(lambda: data.num_connections == 0)
    async with linked_host(tmp_path) as (host, _):
        with pytest.raises(LinkBroken, match="reads over TLS only"):
            await dialled(host, fleet.member())


async def test_until_the_set_time_services_of_release_0_2_are_read_and_answered(tmp_path: Path) -> None:
    fleet, soon = Authority(), time.time() + 3600
    async with linked_host(tmp_path, tls=fleet.member(plaintext_until=soon).tls) as (host, _):
        old_reader = await DataConnection.connect(host.service.handshake.tcp_address)
        new_reader = await dialled(host, fleet.member())
        for connection in (old_reader, new_reader):
            assert await exchanged(host, connection) == bytes(3)
            connection.close()
    async with linked_host(tmp_path) as (old_host, _):
        connection = await dialled(old_host, fleet.member(plaintext_until=soon))
        assert await exchanged(old_host, connection) == bytes(3)
        connection.close()


async def test_a_link_that_cannot_be_encrypted_falls_back_to_grpc(tmp_path: Path) -> None:
    fleet = Authority()
    async with (
        linked_host(tmp_path, tls=fleet.member().tls) as (here, _),
        linked_host(tmp_path, tls=Authority().member().tls) as (there, _),
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        event, _ = await watch_all(reader, await sealed(writer, SLOTS), "r")
        assert event.transport == "grpc" and "took no connection" in link_of(here).note


# ------------------------------------------------------------------------------------------- renewal and revocation


async def test_the_next_connection_uses_a_renewed_certificate(tmp_path: Path) -> None:
    fleet = Authority()
    holder, reader = fleet.member(), fleet.member()
    async with linked_host(tmp_path, tls=holder.tls) as (host, _):
        first = await dialled(host, reader)
        assert await exchanged(host, first) == bytes(3)
        holder.renew()
        reader.renew()
        second = await dialled(host, reader)
        for connection in (second, first):
            assert await exchanged(host, connection) == bytes(3), "the old one goes on"
            connection.close()
    assert len(set(holder.peers.serials)) == 2 == len(set(reader.peers.serials))


class Stuck:
    """A source of 1 GiB that stops after the first MiB until the test lets it end."""

    num_bytes = 1 << 30

    def __init__(self, gate: threading.Event | None = None) -> None:
        self._gate = gate

    def __iter__(self) -> Iterator[list[memoryview]]:
        piece = memoryview(bytes(1 << 20))
        for _ in range(1 << 10):
            yield [piece]
            if self._gate is not None:
                self._gate.wait(20)
                raise KvNotFound("the test is over")

    def finish(self) -> list[int]:
        raise AssertionError("nobody reads so much")


async def test_a_revoked_reader_is_disconnected_at_once_also_in_the_middle_of_a_block(tmp_path: Path) -> None:
    fleet = Authority()
    holder, idle, busy, other = (fleet.member() for _ in range(4))
    sending = asyncio.Event()
    inner: list[OpenSource] = []

    @asynccontextmanager
    async def much(request: kv.DataRequest) -> AsyncIterator[Source]:
        if request.probe.num_bytes == 3:
            async with inner[0](request) as source:
                yield source
        else:
            sending.set()
            yield Stuck()  # the reader takes nothing, so the kernel's buffers are full and the thread waits

    async with linked_host(tmp_path, tls=holder.tls, open_source=much) as (host, data):
        # 1. one connection idles, on one a thread waits, a third is of somebody else
        inner.append(host.service.open_source)
        connections = [await dialled(host, member) for member in (idle, busy, other)]
        for connection in connections:
            assert await exchanged(host, connection) == bytes(3)
        connections[1]._wire.send(frames.packed(await a_probe(host, 9)))
        await sending.wait()
        # 2. two are revoked: theirs end within 2 s
        begun = time.monotonic()
        for member in (idle, busy):
            holder.peers.revoke(member.identity)
        await until(lambda: data.num_connections == 1)
        assert time.monotonic() - begun < 2.0
        with pytest.raises(LinkBroken):
            await exchanged(host, connections[0])
        # 3. the third goes on, and the revoked ones do not get in again
        assert await exchanged(host, connections[2]) == bytes(3)
        assert [opened.identity for opened in holder.peers.open] == [other.identity]
        for connection in connections:
            connection.close()
        with pytest.raises(LinkBroken):
            await exchanged(host, await dialled(host, idle))


async def test_a_reader_breaks_off_what_it_reads_from_a_revoked_holder(tmp_path: Path) -> None:
    fleet, gate = Authority(), threading.Event()
    holder, reader = fleet.member(), fleet.member()

    @asynccontextmanager
    async def stuck(request: kv.DataRequest) -> AsyncIterator[Source]:
        yield Stuck(gate)

    async with linked_host(tmp_path, tls=holder.tls, open_source=stuck) as (host, data):
        connection = await dialled(host, reader)
        buffer = memoryview(bytearray(1 << 30))
        reading = asyncio.create_task(asyncio.to_thread(connection.exchange, await a_probe(host), [buffer]))
        await until(lambda: data.num_connections == 1)
        begun = time.monotonic()
        reader.peers.revoke(holder.identity)
        with pytest.raises(LinkBroken):
            await reading
        assert time.monotonic() - begun < 2.0
        connection.close()
        assert reader.peers.open == []
        gate.set()
        await until(lambda: data.num_connections == 0)


@pytest.mark.parametrize("kind", ["cut", "flip"])
async def test_a_fault_on_the_way_costs_one_fallback(tmp_path: Path, kind: str) -> None:
    fleet = Authority()
    async with (
        linked_host(tmp_path, tls=fleet.member().tls) as (here, _),
        linked_host(tmp_path, tls=fleet.member().tls) as (there, _),
        proxied(there) as proxy,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        await watch_all(reader, await sealed(writer, [0]), "r")
        proxy.fault = TransferFault(kind, after=BLOCK_BYTES + 100)
        event, _ = await watch_all(reader, await sealed(writer, SLOTS), "r")
        assert event.transport == "grpc"
        assert await bytes_at(here, event.slab) == b"".join(map(writer.block, SLOTS))
        assert (link_of(here).num_errors, link_of(here).num_fallbacks) == (1, 1)


async def test_a_client_that_never_shakes_hands_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer_svc.transport.data_server._FIRST_REQUEST_SECONDS", 0.05)
    async with linked_host(tmp_path, tls=Authority().member().tls) as (host, data):
        address, _, port = host.service.handshake.tcp_address.rpartition(":")
        reader, writer = await asyncio.open_connection(address, int(port))
        assert await reader.read() == b""
        writer.close()
        await until(lambda: data.num_connections == 0)


async def test_with_certificates_a_service_listens_beyond_loopback() -> None:
    def nobody(request: kv.DataRequest) -> None:
        raise AssertionError

    server = DataServer("0.0.0.0:0", nobody, nobody, tls=Authority().member().tls)  # type: ignore[arg-type]
    assert (await server.start()).startswith("0.0.0.0:")
    await server.stop()
