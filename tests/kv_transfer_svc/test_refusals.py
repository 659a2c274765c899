"""Tests that invalid calls are refused with a typed error and change nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import (
    FingerprintMismatch,
    InvalidRequest,
    KvCorrupt,
    KvNotFound,
    StaleIncarnation,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.regions import RegionClient
from tandem_runtime.kv_handle import HandleState
from tests.kv_transfer_svc.host import (
    a_client,
    closed,
    nothing_is_left,
    running_host,
    running_writer,
    watch_all,
)
from tests.kv_transfer_svc.layout import BLOCK_BYTES, a_layout


async def test_late_calls_are_told_that_the_handle_is_gone(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle()
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await reader.release_all(handle)
        with pytest.raises(KvNotFound, match="nobody needs it"):
            await writer.client.seal(handle, [writer.slab(0, 0, [0])])
        with pytest.raises(KvNotFound, match="nobody needs it"):
            await watch_all(reader, handle, "r")
        with pytest.raises(KvNotFound):
            await writer.client.reserve(handle, writer.region_id, a_layout())


async def test_a_handle_released_before_it_is_reserved_stays_released(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as gateway:
        handle = writer.handle()
        assert await gateway.release_all(handle) is HandleState.RELEASED
        with pytest.raises(KvNotFound):
            await writer.client.reserve(handle, writer.region_id, a_layout())
        assert nothing_is_left(host)


async def test_a_wrong_signature_is_refused_everywhere(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle()
        handle.num_readers = 9
        for call in (
            writer.client.reserve(handle, writer.region_id, a_layout()),
            writer.client.seal(handle, []),
            reader.release_all(handle),
            reader.abort(handle, Unavailable("no")),
            reader.renew([handle], "r"),
            watch_all(reader, handle, "r"),
        ):
            with pytest.raises(Unauthenticated, match="wrong signature"):
                await call
        assert nothing_is_left(host)


async def test_a_reader_with_another_layout_is_told_which_field_differs(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle()
        await writer.client.reserve(handle, writer.region_id, a_layout())
        with pytest.raises(FingerprintMismatch, match=r"dtype: bfloat16 here, float32 there") as refused:
            await anext(reader.watch(handle, "r", a_layout(dtype="bfloat16")))
        assert refused.value.field == "layout.groups[0].dtype"


async def test_a_writer_with_another_layout_than_the_handle_is_refused(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        with pytest.raises(FingerprintMismatch) as refused:
            await writer.client.reserve(writer.handle(), writer.region_id, a_layout(num_kv_heads=4))
        assert refused.value.field == "layout_digest"


async def test_what_is_not_built_is_refused_by_name(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        with pytest.raises(Unsupported, match="KV_GROUP_KIND_LATENT"):
            await writer.client.reserve(writer.handle(), writer.region_id, a_layout(kind=pb.KV_GROUP_KIND_LATENT))
        handle = writer.handle()
        await writer.client.reserve(handle, writer.region_id, a_layout())
        slab = writer.slab(0, 0, [0])
        slab.extents[0].kind = pb.MEMORY_KIND_DEVICE
        with pytest.raises(Unsupported, match="MEMORY_KIND_DEVICE"):
            await writer.client.seal(handle, [slab])


async def test_a_slab_outside_its_region_or_layout_is_refused(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        handle = writer.handle()
        await writer.client.reserve(handle, writer.region_id, a_layout())
        outside, short, foreign = (writer.slab(0, 0, [0]) for _ in range(3))
        outside.extents[0].offset = writer.region.total_bytes
        short.extents[0].num_bytes -= 1
        foreign.extents[0].region_id = "another"
        for slab in (outside, short, foreign, writer.slab(1, 0, [0]), writer.slab(0, 0, [0], num_layers=3)):
            with pytest.raises(InvalidRequest):
                await writer.client.seal(handle, [slab])
        with pytest.raises(InvalidRequest, match="closed with 1 blocks"):
            await writer.client.seal(handle, [writer.slab(0, 0, [0, 1])], closed(1))
        assert await writer.client.seal(handle, [writer.slab(0, 0, [0])]) is HandleState.FILLING


async def test_handles_of_other_lives_are_refused(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, running_writer(host) as other:
        with pytest.raises(StaleIncarnation):
            await other.client.reserve(writer.handle(), other.region_id, a_layout())
        writer.holder_incarnation = "an earlier life"
        stale = writer.handle()
        with pytest.raises(StaleIncarnation, match="an earlier life"):
            await writer.client.reserve(stale, writer.region_id, a_layout())
        assert await writer.client.release_all(stale) is HandleState.EXPIRED


async def test_a_slot_reused_under_a_reader_is_noticed(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=2)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.client.seal(handle, [writer.slab(0, 0, [0, 1])], closed(2))
        slab = (await watch_all(reader, handle, "r"))[0].slab
        writer.region.next_generation(1)
        with pytest.raises(KvCorrupt, match=r"slot 1 .* has generation 1, sealed was 0"):
            await reader.read(handle, "r", slab, memoryview(bytearray(2 * BLOCK_BYTES)))


async def test_a_block_that_does_not_match_the_writers_checksum_is_noticed(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=2)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        wrong_first = writer.slab(0, 0, [0, 1])
        wrong_first.checksums.extend([1, 2])
        with pytest.raises(KvCorrupt, match="slot 0 does not match"):  # the sampled one
            await writer.client.seal(handle, [wrong_first])
        wrong_second = writer.slab(0, 0, [0, 1])
        wrong_second.checksums.extend([block_checksum(writer.block(0)), 2])
        await writer.client.seal(handle, [wrong_second], closed(2))
        slab = (await watch_all(reader, handle, "r"))[0].slab
        with pytest.raises(KvCorrupt, match="block 1 does not match its checksum"):
            await reader.read(handle, "r", slab, memoryview(bytearray(2 * BLOCK_BYTES)))


async def test_readers_cannot_write_into_a_region(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        grant = await RegionClient(host.socket).fetch(writer.region_id)
        try:
            with pytest.raises(OSError):
                os.pwrite(grant.fd, b"x", 0)
        finally:
            os.close(grant.fd)
        with pytest.raises(KvNotFound, match="no region unknown"):
            await RegionClient(host.socket).fetch("unknown")
