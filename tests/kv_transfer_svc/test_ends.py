"""Tests of every end of a handle: both sides are notified and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KvNotFound,
    Unavailable,
)
from tandem_runtime.kv.seal_stream import seal_request
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


async def test_a_writer_that_falls_silent_loses_its_handle_and_the_reader_is_told(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle()
        await writer.client.reserve(handle, writer.region_id, a_layout())
        watching = asyncio.ensure_future(watch_all(reader, handle, "r"))
        await until(lambda: any(record.watching["r"] for record in host.store.live()))
        host.put_forward(9.0)
        assert not watching.done()
        host.put_forward(1.5)
        with pytest.raises(KvNotFound, match="neither sealed nor renewed for 10 s"):
            await watching
        ended = await anext(writer.client.own(writer.region_id))
        assert isinstance(ended, kv.OwnerEvent.Ended) and ended.state == kv.HANDLE_STATE_EXPIRED
        assert nothing_is_left(host)


async def test_a_reader_that_waits_in_vain_is_told_at_the_deadline(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        watching = asyncio.ensure_future(watch_all(reader, writer.handle(seconds=30), "r"))
        await until(lambda: host.store.num_live == 1)
        host.put_forward(29.0)
        assert host.store.num_live == 1
        host.put_forward(1.5)
        with pytest.raises(DeadlineExceeded, match="deadline has passed"):
            await watching
        assert nothing_is_left(host)


async def test_a_sealed_handle_lives_while_its_reader_renews_and_no_longer(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=1)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.client.seal(handle, [writer.slab(0, 0, [0])], closed(1))
        await watch_all(reader, handle, "r")
        for _ in range(3):
            host.put_forward(8.0)
            assert await reader.renew([handle], "r") == [HandleState.LEASED]
        host.put_forward(10.5)
        assert await reader.renew([handle], "r") == [HandleState.EXPIRED]
        assert nothing_is_left(host)


async def test_a_stream_of_seals_is_the_same_as_calls(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=2)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        line = writer.client.seal_stream()
        for request in (
            seal_request(handle, [writer.slab(0, 0, [0])], None),
            seal_request(handle, [writer.slab(1, 1, [1])], closed(2)),
        ):
            reply = await line.seal(request)
        assert reply.state == kv.HANDLE_STATE_SEALED
        assert [event.WhichOneof("kind") for event in await watch_all(reader, handle, "r")] == [
            "slab",
            "slab",
            "closed",
        ]
        with pytest.raises(InvalidRequest, match="sealed and cannot change"):
            await line.seal(seal_request(handle, [writer.slab(0, 0, [1])], None))
        line.close()


async def test_a_dead_owner_is_told_to_its_waiting_reader_at_once(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle()
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.client.seal(handle, [writer.slab(0, 0, [0])])
        watching = reader.watch(handle, "r", a_layout())
        assert (await anext(watching)).HasField("slab")
        waiting = asyncio.ensure_future(anext(watching))
        await writer.die()
        with pytest.raises(Unavailable, match="is gone"):
            await waiting
        assert len(host.store.regions) == 0
        assert nothing_is_left(host)


async def test_whoever_waits_for_a_writer_that_dies_before_it_reserved_is_told(tmp_path: Path) -> None:
    """The service may learn of the death before the first call: it was stopped, and no abort could reach it."""
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        waiting = asyncio.ensure_future(watch_all(reader, writer.handle(), "r"))
        await until(lambda: host.store.num_live == 1)
        await writer.die()
        with pytest.raises(Unavailable, match="is gone"):
            await waiting
        with pytest.raises(Unavailable, match="is gone"):
            await watch_all(reader, writer.handle(), "r")
        assert await reader.release(writer.handle(), "r") is HandleState.ABORTED
        assert nothing_is_left(host)


async def test_an_owner_that_was_away_hears_of_what_ended_meanwhile(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handles = [writer.handle() for _ in range(3)]
        for handle in handles:
            await writer.client.reserve(handle, writer.region_id, a_layout())
        await reader.release_all(handles[0])
        owning = writer.client.own(writer.region_id)
        assert (await anext(owning)).handle_id == handles[0].handle_id
        await owning.aclose()
        await reader.release_all(handles[1])
        await reader.abort(handles[2], Unavailable("no"))
        again = writer.client.own(writer.region_id)
        ended = [(await anext(again)).handle_id for _ in range(3)]
        assert ended == [handle.handle_id for handle in handles]


async def test_an_owner_that_is_not_told_makes_orphans(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=1)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.client.seal(handle, [writer.slab(0, 0, [0])], closed(1))
        await reader.release_all(handle)
        assert host.store.orphan_bytes == 0
        host.put_forward(11.0)
        assert host.store.orphan_bytes == BLOCK_BYTES
        await anext(writer.client.own(writer.region_id))
        await until(lambda: host.store.orphan_bytes == 0)


async def test_a_region_is_offered_again_after_the_service_restarts(tmp_path: Path) -> None:
    async with running_host(tmp_path) as first, running_writer(first) as writer, running_host(tmp_path) as second:
        await writer.regions.move(second.socket)
        await first.regions.close()
        await until(lambda: len(second.store.regions) == 1)


async def test_a_draining_service_takes_no_new_handles_and_ends_with_the_old_ones(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle, awaited = writer.handle(), writer.handle()
        await writer.client.reserve(handle, writer.region_id, a_layout())
        waiting = asyncio.ensure_future(watch_all(reader, awaited, "r"))
        await until(lambda: host.store.num_live == 2)
        draining = asyncio.ensure_future(host.service.drained())
        with pytest.raises(Draining):
            await waiting
        with pytest.raises(Draining):
            await writer.client.reserve(writer.handle(), writer.region_id, a_layout())
        assert await writer.client.seal(handle, [writer.slab(0, 0, [0])], closed(1)) is HandleState.SEALED
        assert not draining.done()
        await reader.release(handle, "r")
        await draining
        assert nothing_is_left(host)


async def test_a_reader_that_leaves_its_stream_keeps_its_lease_until_that_runs_out(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=2)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        watching = asyncio.ensure_future(watch_all(reader, handle, "r"))
        await until(lambda: any(record.watching["r"] for record in host.store.live()))
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await until(lambda: not any(record.watching["r"] for record in host.store.live()))
        (record,) = host.store.live()
        assert record.machine.num_leases == 1
        await writer.client.seal(handle, [writer.slab(0, 0, [0, 1])], closed(2))
        events = await watch_all(reader, handle, "r")
        assert len(events) == 2
