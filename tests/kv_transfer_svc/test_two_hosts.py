"""Tests of a hand-over between two hosts: the reader's KV service pulls from the holder's service."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import FingerprintMismatch, KvCorrupt, Overloaded, Unavailable
from tandem_runtime.kv.regions import RegionClient
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_runtime.kv_handle import HandleState
from tests.kv_transfer_svc.host import (
    Host,
    a_client,
    closed,
    nothing_is_left,
    running_host,
    running_writer,
    until,
    watch_all,
)
from tests.kv_transfer_svc.layout import BLOCK_BYTES, a_layout
from tests.kv_transfer_svc.writer import Writer


async def sealed_handle(writer: Writer, slots: list[int], num_readers: int = 1) -> pb.KvHandle:
    """Return a closed handle with one slab per two blocks."""
    handle = writer.handle(num_blocks=len(slots), num_readers=num_readers)
    await writer.client.reserve(handle, writer.region_id, a_layout())
    slabs = [writer.slab(index, 2 * index, slots[2 * index : 2 * index + 2]) for index in range((len(slots) + 1) // 2)]
    await writer.client.seal(handle, slabs, closed(len(slots)))
    return handle


async def bytes_at(host: Host, slab: kv.Slab) -> bytes:
    """Read a slab's bytes as a reader on `host` does."""
    grant = await RegionClient(host.socket).fetch(slab.extents[0].region_id)
    region = SharedRegion.map_read_only(grant.fd, grant.num_slots, grant.generations_offset)
    try:
        return b"".join(region.copy_out(extent, 0, extent.num_bytes) for extent in slab.extents)
    finally:
        region.close()


async def until_everything_is_back(*hosts: Host) -> None:
    """Wait until each service is empty again, by its own stats."""
    for host in hosts:
        await until(partial(nothing_is_left, host))


async def test_blocks_arrive_equal_and_leave_nothing_behind(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path) as here,
        running_host(tmp_path) as there,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        slots = [5, 3, 8, 1]
        handle = await sealed_handle(writer, slots)
        *slabs, last = await watch_all(reader, handle, "r")
        assert [event.transport for event in slabs] == ["grpc", "grpc"]
        assert (last.closed.num_blocks, last.closed.num_slabs, last.closed.first_tokens[0].token_id) == (4, 2, 7)
        pulled = b"".join([await bytes_at(here, event.slab) for event in slabs])
        assert pulled == b"".join(map(writer.block, slots))
        assert here.store.counters["bytes_pulled"] == 4 * BLOCK_BYTES == there.store.counters["bytes_served"]
        assert here.arena.used_bytes == 4 * BLOCK_BYTES
        assert here.arena.free_bytes + here.arena.used_bytes == here.arena.total_bytes
        assert await reader.release(handle, "r") is HandleState.RELEASED
        await until_everything_is_back(here, there)
        ended = await anext(writer.client.own(writer.region_id))
        assert isinstance(ended, kv.OwnerEvent.Ended) and ended.state == kv.HANDLE_STATE_RELEASED


async def test_slabs_are_pulled_while_the_rest_is_still_computed(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path) as here,
        running_host(tmp_path) as there,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = writer.handle(num_blocks=4)
        watching = reader.watch(handle, "r", a_layout())
        first = asyncio.ensure_future(anext(watching))
        await until(lambda: there.store.num_live == 1)  # the watch has reached the holder, before Reserve
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.client.seal(handle, [writer.slab(0, 0, [0, 1])])
        assert await bytes_at(here, (await first).slab) == writer.block(0) + writer.block(1)
        await writer.client.seal(handle, [writer.slab(1, 2, [2, 3])], closed(4))
        assert (await anext(watching)).slab.first_block == 2
        assert (await anext(watching)).HasField("closed")
        await reader.release(handle, "r")
        await until_everything_is_back(here, there)


async def test_only_blocks_that_are_missing_are_pulled(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path) as here,
        running_host(tmp_path) as there,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = await sealed_handle(writer, [0, 1, 2, 3, 4])
        events = await watch_all(reader, handle, "r", first_block=3)
        assert [event.slab.first_block for event in events[:-1]] == [3, 4]
        assert b"".join([await bytes_at(here, event.slab) for event in events[:-1]]) == writer.block(3) + writer.block(
            4
        )
        assert here.store.counters["bytes_pulled"] == 2 * BLOCK_BYTES
        await reader.release(handle, "r")
        await until_everything_is_back(here, there)


async def test_layers_may_come_one_after_the_other(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path) as here,
        running_host(tmp_path) as there,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = writer.handle(num_blocks=2)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        for layer in range(2):
            slab = writer.slab(layer, 0, [6, 4], first_layer=layer, num_layers=1)
            for extent in slab.extents:
                extent.offset += layer * BLOCK_BYTES // 2
                extent.num_bytes = BLOCK_BYTES // 2
            await writer.client.seal(handle, [slab], closed(2) if layer == 1 else None)
        first, second, _ = await watch_all(reader, handle, "r")
        layers = [await bytes_at(here, event.slab) for event in (first, second)]
        half = BLOCK_BYTES // 2
        assert layers[0] == writer.block(6)[:half] + writer.block(4)[:half]
        assert layers[1] == writer.block(6)[half:] + writer.block(4)[half:]
        assert here.arena.used_bytes == 2 * BLOCK_BYTES  # the layers of a block lie together again
        await reader.release(handle, "r")
        await until_everything_is_back(here, there)


async def test_choices_on_one_host_share_one_copy(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path) as here,
        running_host(tmp_path) as there,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = await sealed_handle(writer, [0, 1, 2], num_readers=2)
        await watch_all(reader, handle, "a")
        await watch_all(reader, handle, "b", first_block=1)
        assert here.store.counters["bytes_pulled"] == 3 * BLOCK_BYTES
        assert await reader.release(handle, "a") is not HandleState.RELEASED
        assert here.arena.used_bytes == 3 * BLOCK_BYTES
        assert await reader.release(handle, "b") is HandleState.RELEASED
        await until_everything_is_back(here, there)


async def test_a_pull_waits_for_room_and_one_that_never_fits_is_refused(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path, arena_bytes=4 * BLOCK_BYTES) as here,
        running_host(tmp_path) as there,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        first, second = await sealed_handle(writer, [0, 1, 2]), await sealed_handle(writer, [3, 4])
        await watch_all(reader, first, "r")
        waiting = asyncio.ensure_future(watch_all(reader, second, "r"))
        await until(lambda: len(here.arena._waiting) == 1)
        await reader.release(first, "r")
        assert len(await waiting) == 2
        too_long = await sealed_handle(writer, [5, 6, 7, 8, 9])
        with pytest.raises(Overloaded, match="raise --arena-bytes"):
            await watch_all(reader, too_long, "r")
        for handle in (second, too_long):
            await reader.release(handle, "r")
        await until_everything_is_back(here, there)


async def test_a_dead_prefill_worker_is_told_across_hosts_at_once(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path) as here,
        running_host(tmp_path) as there,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = writer.handle()
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.client.seal(handle, [writer.slab(0, 0, [0])])
        watching = reader.watch(handle, "r", a_layout())
        assert (await anext(watching)).HasField("slab")
        waiting = asyncio.ensure_future(anext(watching))
        await writer.die()
        with pytest.raises(Unavailable, match="is gone"):
            await waiting
        await until_everything_is_back(here, there)


async def test_a_dead_holder_is_told_to_the_reader_at_once(tmp_path: Path) -> None:
    async with running_host(tmp_path) as here, a_client(here) as reader:
        async with running_host(tmp_path) as there, running_writer(there) as writer:
            handle = writer.handle()
            await writer.client.reserve(handle, writer.region_id, a_layout())
            watching = asyncio.ensure_future(watch_all(reader, handle, "r"))
            await until(lambda: any(record.watching["r"] for record in there.store.live()))
            await there.server.stop(0)
            with pytest.raises(Unavailable):
                await watching
        await until_everything_is_back(here)


async def test_a_reader_that_dies_gives_the_arena_back_when_its_lease_runs_out(tmp_path: Path) -> None:
    async with running_host(tmp_path) as here, running_host(tmp_path) as there, running_writer(there) as writer:
        async with a_client(here) as reader:
            handle = await sealed_handle(writer, [0, 1])
            await watch_all(reader, handle, "r")
        assert here.arena.used_bytes == 2 * BLOCK_BYTES
        here.put_forward(10.5)
        await until_everything_is_back(here)
        there.put_forward(10.5)
        await until_everything_is_back(there)


async def test_a_reader_that_leaves_during_the_pull_stops_it(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path) as here,
        running_host(tmp_path) as there,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = writer.handle(num_blocks=4)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.client.seal(handle, [writer.slab(0, 0, [0, 1])])
        watching = reader.watch(handle, "r", a_layout())
        await anext(watching)
        assert await reader.release(handle, "r") is HandleState.RELEASED
        await until_everything_is_back(here, there)


async def test_mismatch_and_corruption_come_back_as_themselves(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path) as here,
        running_host(tmp_path) as there,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = await sealed_handle(writer, [0, 1])
        with pytest.raises(FingerprintMismatch) as refused:
            await anext(reader.watch(handle, "r", a_layout(order="kv,layer,head,token,dim")))
        assert refused.value.field == "layout.groups[0].order"
        writer.region.next_generation(0)
        with pytest.raises(KvCorrupt):
            await watch_all(reader, handle, "r")
        await reader.release(handle, "r")
        await until_everything_is_back(here, there)


async def test_a_copy_can_be_read_over_grpc_from_the_readers_own_service(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path) as here,
        running_host(tmp_path) as there,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = await sealed_handle(writer, [9, 2])
        slab = (await watch_all(reader, handle, "r"))[0].slab
        buffer = bytearray(2 * BLOCK_BYTES)
        await reader.read(handle, "r", slab, memoryview(buffer))
        assert bytes(buffer) == writer.block(9) + writer.block(2)
        await reader.release_all(handle)
        await until_everything_is_back(here, there)
