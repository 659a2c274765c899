"""Tests of links: bytes arrive unchanged over the best working transport, and every fault is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kv_transfer_svc.transport import tcp_transport
from kv_transfer_svc.transport.data_server import OpenSource
from kv_transfer_svc.transport.source import Source
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import KvCorrupt, Unauthenticated, Unavailable
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.client import KvClient
from tests.kv_transfer_svc.host import a_client, running_writer, until, watch_all
from tests.kv_transfer_svc.layout import BLOCK_BYTES
from tests.kv_transfer_svc.test_two_hosts import bytes_at
from tests.kv_transfer_svc.transport.harness import (
    Proxy,
    TransferFault,
    everything_is_back,
    link_of,
    linked_host,
    proxied,
    sealed,
)
from tests.kv_transfer_svc.writer import Writer

SLOTS = [5, 3, 8, 1]


def whole(writer: Writer) -> bytes:
    return b"".join(map(writer.block, SLOTS))


async def test_blocks_arrive_equal_over_tcp_and_leave_nothing_behind(tmp_path: Path) -> None:
    async with (
        linked_host(tmp_path) as (here, _),
        linked_host(tmp_path) as (there, _),
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = await sealed(writer, SLOTS)
        event, _ = await watch_all(reader, handle, "r")
        assert event.transport == "tcp"
        assert await bytes_at(here, event.slab) == whole(writer)
        assert list(event.slab.checksums) == [block_checksum(writer.block(slot)) for slot in SLOTS]
        assert here.store.counters["bytes_pulled"] == 4 * BLOCK_BYTES == there.store.counters["bytes_served"]
        link = link_of(here)
        assert (link.address, link.transport, link.num_transfers, link.num_bytes) == (
            there.address,
            "tcp",
            1,
            4 * BLOCK_BYTES,
        )
        assert link.bytes_per_second > 0 and link.latency_ms > 0  # the probe's
        assert (link.num_errors, link.num_fallbacks, link.note) == (0, 0, "")
        await reader.release(handle, "r")
        await everything_is_back(here, there)


async def test_only_blocks_that_are_missing_come_over_tcp(tmp_path: Path) -> None:
    async with (
        linked_host(tmp_path) as (here, _),
        linked_host(tmp_path) as (there, _),
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = await sealed(writer, SLOTS)
        event, _ = await watch_all(reader, handle, "r", first_block=3)
        assert (event.transport, await bytes_at(here, event.slab)) == ("tcp", writer.block(1))
        await reader.release(handle, "r")
        await everything_is_back(here, there)


async def test_services_of_one_host_copy_from_each_others_regions(tmp_path: Path) -> None:
    async with (
        linked_host(tmp_path, host_id="h", transports=("shm", "tcp", "grpc")) as (here, _),
        linked_host(tmp_path, host_id="h") as (there, _),
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = await sealed(writer, SLOTS)
        event, _ = await watch_all(reader, handle, "r")
        assert (event.transport, await bytes_at(here, event.slab)) == ("shm", whole(writer))
        assert [link.host_id for link in here.service.puller.links.report()] == ["h"], "as metrics name the peer"
        assert there.store.counters["bytes_served"] == 0
        await reader.release(handle, "r")
        await everything_is_back(here, there)


async def test_a_setting_restricts_the_transports(tmp_path: Path) -> None:
    async with (
        linked_host(tmp_path, transports=("grpc",)) as (here, _),
        linked_host(tmp_path) as (there, data),
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        event, _ = await watch_all(reader, await sealed(writer, SLOTS), "r")
        assert (event.transport, link_of(here).transport, link_of(here).note) == ("grpc", "grpc", "")
        assert data.num_connections == 0


async def test_a_service_that_offers_no_tcp_is_read_over_grpc(tmp_path: Path) -> None:
    async with (
        linked_host(tmp_path) as (here, _),
        linked_host(tmp_path) as (there, _),
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        there.service.handshake.tcp_address = ""
        event, _ = await watch_all(reader, await sealed(writer, SLOTS), "r")
        assert (event.transport, link_of(here).note) == ("grpc", "")


async def test_a_transport_that_cannot_be_opened_is_reported_and_tried_again_later(tmp_path: Path) -> None:
    async with (
        linked_host(tmp_path) as (here, _),
        linked_host(tmp_path) as (there, _),
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        # 1. nobody listens at the advertised data address
        handshake = there.service.handshake
        right, handshake.tcp_address = handshake.tcp_address, "127.0.0.1:1"
        event, _ = await watch_all(reader, await sealed(writer, SLOTS), "r")
        assert event.transport == "grpc"
        assert link_of(here).note.startswith("fallback: tcp: 127.0.0.1:1 took no connection")
        assert link_of(here).num_fallbacks == 1 == here.store.counters["link_fallbacks"]
        # 2. within the first second the link does not search again
        handshake.tcp_address = right
        event, _ = await watch_all(reader, await sealed(writer, SLOTS), "r")
        assert (event.transport, link_of(here).transport) == ("grpc", "grpc")
        # 3. after that the next read starts a search in the background
        here.put_forward(1.1)
        await watch_all(reader, await sealed(writer, SLOTS), "r")
        await until(lambda: link_of(here).transport == "tcp")
        event, _ = await watch_all(reader, await sealed(writer, SLOTS), "r")
        assert (event.transport, link_of(here).note) == ("tcp", "")


async def test_a_connection_that_breaks_in_a_block_costs_one_fallback(tmp_path: Path) -> None:
    async with (
        linked_host(tmp_path) as (here, _),
        linked_host(tmp_path) as (there, _),
        proxied(there) as proxy,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        await watch_all(reader, await sealed(writer, [0]), "r")
        proxy.fault = TransferFault("cut", after=BLOCK_BYTES + 100)
        event, _ = await watch_all(reader, await sealed(writer, SLOTS), "r")
        assert (event.transport, await bytes_at(here, event.slab)) == ("grpc", whole(writer))
        link = link_of(here)
        assert (link.num_errors, link.num_fallbacks) == (1, 1)
        assert "disconnected" in link.note or "failed" in link.note
        here.service.puller.links.to(there.address, "").open()
        await until(lambda: link_of(here).transport == "tcp")
        event, _ = await watch_all(reader, await sealed(writer, SLOTS), "r")
        assert (event.transport, link_of(here).note) == ("tcp", "")


async def test_an_idle_connection_that_was_closed_is_opened_again_without_a_word(tmp_path: Path) -> None:
    async with (
        linked_host(tmp_path) as (here, _),
        linked_host(tmp_path) as (there, data),
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        await watch_all(reader, await sealed(writer, [0]), "r")
        for task in list(data._connections):  # as it does itself with connections that are idle for long
            task.cancel()
        await until(lambda: data.num_connections == 0)
        event, _ = await watch_all(reader, await sealed(writer, SLOTS), "r")
        assert (event.transport, link_of(here).num_errors) == ("tcp", 0)


async def test_a_peer_that_dies_in_a_block_is_a_typed_error_and_leaves_nothing(tmp_path: Path) -> None:
    async with linked_host(tmp_path) as (here, _), a_client(here) as reader:
        async with linked_host(tmp_path) as (there, data), proxied(there) as proxy, running_writer(there) as writer:
            first = await sealed(writer, [0])
            await watch_all(reader, first, "r")
            await reader.release(first, "r")
            proxy.fault = TransferFault("stall", after=BLOCK_BYTES + 100)
            reading = asyncio.ensure_future(watch_all(reader, await sealed(writer, SLOTS), "r"))
            await proxy.has_stalled.wait()
            await data.stop()
            await there.server.stop(0)
            await proxy.close()
            with pytest.raises(Unavailable):
                await reading
        await everything_is_back(here)


async def _leave_in_a_block(proxy: Proxy, writer: Writer, reader: KvClient) -> int:
    """Read over a warm connection, and leave while it stalls; return the connections so far."""
    first = await sealed(writer, [0])
    await watch_all(reader, first, "r")
    await reader.release(first, "r")
    num_connections = proxy.num_connections
    proxy.fault = TransferFault("stall", after=BLOCK_BYTES + 100)
    handle = await sealed(writer, SLOTS)
    reading = asyncio.ensure_future(watch_all(reader, handle, "r"))
    await proxy.has_stalled.wait()
    await reader.release(handle, "r")
    with pytest.raises(Exception, match="released"):
        await reading
    return num_connections


async def test_a_reader_that_leaves_in_a_block_stops_the_thread_that_writes(tmp_path: Path) -> None:
    async with (
        linked_host(tmp_path) as (here, _),
        linked_host(tmp_path) as (there, _),
        proxied(there) as proxy,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        await _leave_in_a_block(proxy, writer, reader)
        await everything_is_back(here, there)


async def test_a_connection_outlives_a_reader_that_leaves_in_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_transport, "FINISH_SECONDS", 60.0)
    async with (
        linked_host(tmp_path) as (here, _),
        linked_host(tmp_path) as (there, _),
        proxied(there) as proxy,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        num_connections = await _leave_in_a_block(proxy, writer, reader)
        proxy.goes_on.set()
        await everything_is_back(here, there)
        event, _ = await watch_all(reader, await sealed(writer, SLOTS), "r")
        assert (event.transport, await bytes_at(here, event.slab)) == ("tcp", whole(writer))
        assert (proxy.num_connections, link_of(here).num_errors) == (num_connections, 0)


class ReusedWhileSent:
    """A source whose slot is reused between the first byte and the last."""

    def __init__(self, source: Source, writer: Writer) -> None:
        self.num_bytes = source.num_bytes
        self._source = source
        self._writer = writer

    def __iter__(self) -> Iterator[list[memoryview]]:
        yield from self._source
        self._writer.region.next_generation(8)

    def finish(self) -> list[int]:
        return self._source.finish()


async def test_a_slot_that_is_reused_while_it_is_sent_is_refused_by_the_receiver(tmp_path: Path) -> None:
    writers: list[Writer] = []
    inner: list[OpenSource] = []

    @asynccontextmanager
    async def faulty(request: kv.DataRequest) -> AsyncIterator[Source]:
        async with inner[0](request) as source:
            yield ReusedWhileSent(source, writers[0]) if request.HasField("slab") else source

    async with (
        linked_host(tmp_path) as (here, _),
        linked_host(tmp_path, open_source=faulty) as (there, _),
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        inner.append(there.service.open_source)
        writers.append(writer)
        handle = await sealed(writer, SLOTS)
        with pytest.raises(KvCorrupt, match=r"slot 8 .* has generation 1, sealed was 0"):
            await watch_all(reader, handle, "r")
        assert here.store.counters["checksum_failures"] == 0
        await reader.release(handle, "r")
        await everything_is_back(here, there)


async def test_a_flipped_bit_is_counted_and_read_again_over_grpc(tmp_path: Path) -> None:
    async with (
        linked_host(tmp_path) as (here, _),
        linked_host(tmp_path) as (there, _),
        proxied(there) as proxy,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        await watch_all(reader, await sealed(writer, [0]), "r")
        proxy.fault = TransferFault("flip", after=2 * BLOCK_BYTES)
        event, _ = await watch_all(reader, await sealed(writer, SLOTS), "r")
        assert (event.transport, await bytes_at(here, event.slab)) == ("grpc", whole(writer))
        assert here.store.counters["checksum_failures"] == 1
        assert "do not match their checksums" in link_of(here).note


async def test_bytes_corrupted_by_both_transports_are_a_typed_error(tmp_path: Path) -> None:
    async with (
        linked_host(tmp_path) as (here, _),
        linked_host(tmp_path) as (there, _),
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = await sealed(writer, [0, 1], [block_checksum(writer.block(0)), 2])
        with pytest.raises(KvCorrupt, match="block 1 does not match its checksum"):
            await watch_all(reader, handle, "r")
        assert here.store.counters["checksum_failures"] == 2
        await reader.release(handle, "r")
        await everything_is_back(here, there)


async def test_checksums_are_made_once(tmp_path: Path) -> None:
    async with (
        linked_host(tmp_path) as (here, _),
        linked_host(tmp_path) as (there, _),
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = await sealed(writer, [0, 1])
        await watch_all(reader, handle, "r")
        (record,) = there.store.live()
        assert record.checksums == {(0, block): block_checksum(writer.block(block)) for block in (0, 1)}
        slab = record.machine.slabs[0]
        writer.region.view(BLOCK_BYTES, 1)[0] ^= 1
        async with a_client(there) as another:
            with pytest.raises(KvCorrupt, match="block 1 does not match"):  # the checksum is of the original bytes
                await another.read(handle, "r", slab, memoryview(bytearray(2 * BLOCK_BYTES)))


async def test_a_token_that_has_run_out_is_asked_for_again(tmp_path: Path) -> None:
    async with (
        linked_host(tmp_path) as (here, _),
        linked_host(tmp_path) as (there, _),
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        await watch_all(reader, await sealed(writer, [0]), "r")
        there.clock.ahead += 61.0
        event, _ = await watch_all(reader, await sealed(writer, SLOTS, seconds=600), "r")
        assert (event.transport, link_of(here).num_errors) == ("tcp", 0)


async def test_strangers_get_no_token(tmp_path: Path) -> None:
    async with linked_host(tmp_path) as (there, _), a_client(there) as client:
        request = kv.OpenLinkRequest(incarnation="a stranger", holder_address=there.address, mac=bytes(16))
        with pytest.raises(Unauthenticated, match="wrong MAC"):
            await client.open_link(request)
