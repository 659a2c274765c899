"""Tests of a hand-over on one host: descriptors over gRPC, bytes in shared memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import (
    Unavailable,
)
from tandem_runtime.kv.regions import RegionClient
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_runtime.kv_handle import HandleState
from tests.kv_transfer_svc.host import (
    a_client,
    closed,
    nothing_is_left,
    running_host,
    running_writer,
    until,
    watch_all,
)
from tests.kv_transfer_svc.layout import BLOCK_BYTES, a_layout


async def test_a_reader_sees_each_slab_as_it_is_sealed_and_the_owner_hears_of_the_end(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=4)
        # 1. the reader watches first and waits
        watching = reader.watch(handle, "r", a_layout())
        first = asyncio.ensure_future(anext(watching))
        await until(lambda: host.store.num_live == 1)
        # 2. the writer reserves and seals half of the prompt
        assert (await writer.client.reserve(handle, writer.region_id, a_layout())).state == kv.HANDLE_STATE_RESERVED
        assert await writer.client.seal(handle, [writer.slab(0, 0, [5, 3])]) is HandleState.FILLING
        event = await first
        assert event.transport == "shm"
        assert [extent.slot for extent in event.slab.extents] == [5, 3]
        # 3. the reader maps the region and finds the bytes
        grant = await RegionClient(host.socket).fetch(writer.region_id)
        region = SharedRegion.map_read_only(grant.fd, grant.num_slots, grant.generations_offset)
        assert region.copy_out(event.slab.extents[1], 0, BLOCK_BYTES) == writer.block(3)
        region.close()
        # 4. the last seal closes the handle, with the first token
        assert await writer.client.seal(handle, [writer.slab(1, 2, [1, 2])], closed(4)) is HandleState.LEASED
        assert (await anext(watching)).slab.first_block == 2
        last = (await anext(watching)).closed
        assert (last.num_slabs, last.num_blocks, last.first_tokens[0].token_id) == (2, 4, 7)
        # 5. the reader releases; the owner is notified
        owning = writer.client.own(writer.region_id)
        assert await reader.release(handle, "r") is HandleState.RELEASED
        ended = await anext(owning)
        assert isinstance(ended, kv.OwnerEvent.Ended)
        assert (ended.handle_id, ended.state) == (handle.handle_id, kv.HANDLE_STATE_RELEASED)
        assert nothing_is_left(host)


async def test_every_call_may_come_twice(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle, slab = writer.handle(num_blocks=2), writer.slab(0, 0, [0, 1])
        for _ in range(2):
            await writer.client.reserve(handle, writer.region_id, a_layout())
        for _ in range(2):
            await writer.client.seal(handle, [slab])
        for _ in range(2):
            await writer.client.seal(handle, [slab], closed(2))
        for _ in range(2):
            events = await watch_all(reader, handle, "r")
            assert [event.WhichOneof("kind") for event in events] == ["slab", "closed"]
        assert host.store.leased_bytes == 2 * BLOCK_BYTES
        for _ in range(2):
            assert await reader.release(handle, "r") is HandleState.RELEASED
        for _ in range(2):
            assert await reader.abort(handle, Unavailable("late")) is HandleState.RELEASED
        assert host.store.counters["handles_released"] == 1
        assert nothing_is_left(host)


async def test_blocks_that_a_reader_has_are_not_sent_to_it(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=5)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.client.seal(handle, [writer.slab(0, 0, [0, 1]), writer.slab(1, 2, [2, 3, 4])], closed(5))
        events = await watch_all(reader, handle, "r", first_block=3)
        assert [extent.slot for extent in events[0].slab.extents] == [3, 4]
        assert (events[0].slab.index, events[0].slab.first_block, events[0].slab.num_blocks) == (1, 3, 2)
        assert events[1].closed.num_slabs == 1


async def test_every_choice_releases_once_and_the_last_one_ends_the_handle(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=1, num_readers=3)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.client.seal(handle, [writer.slab(0, 0, [0])], closed(1))
        await asyncio.gather(*(watch_all(reader, handle, name) for name in ("a", "b")))
        assert await reader.release(handle, "a") is HandleState.LEASED
        assert await reader.release(handle, "b") is HandleState.SEALED
        assert await reader.release(handle, "c never watched") is HandleState.RELEASED
        assert nothing_is_left(host)


async def test_bytes_can_be_read_over_grpc_too(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=4)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.client.seal(handle, [writer.slab(0, 0, [4, 2, 9, 7])], closed(4))
        slab = (await watch_all(reader, handle, "r"))[0].slab
        everything = bytearray(4 * BLOCK_BYTES)
        assert await reader.read(handle, "r", slab, memoryview(everything)) == 4 * BLOCK_BYTES
        assert bytes(everything) == b"".join(map(writer.block, [4, 2, 9, 7]))
        tail = bytearray(2 * BLOCK_BYTES)
        assert await reader.read(handle, "r", slab, memoryview(tail), first_block=2) == 2 * BLOCK_BYTES
        assert bytes(tail) == b"".join(map(writer.block, [9, 7]))
        assert host.store.counters["bytes_served"] == 6 * BLOCK_BYTES
