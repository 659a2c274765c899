"""Tests of a KV service's tables: owners, readers and arena memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.v1.tables_pb2 import (
    TablesReply,
    TablesRequest,
)
from tests.kv_transfer_svc.host import a_client, closed, running_host, running_writer, until, watch_all
from tests.kv_transfer_svc.layout import BLOCK_BYTES, a_layout
from tests.kv_transfer_svc.test_host_cache import chain, published, wanted


async def test_a_kv_service_says_who_owns_and_who_reads_what(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=1)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.client.seal(handle, [writer.slab(0, 0, [0])], closed(1))
        await watch_all(reader, handle, "r-0")
        tables = await host.service.Tables(TablesRequest(max_rows=10), None)
        (row,) = tables.handles
        assert (row.handle_id, row.owner_incarnation, row.state) == (handle.handle_id, writer.incarnation, "LEASED")
        assert [(each.reader_id, each.incarnation) for each in row.readers] == [("r-0", reader.incarnation)]
        assert row.num_bytes == BLOCK_BYTES
        assert [each.owner_incarnation for each in tables.regions] == [writer.incarnation]
        await reader.release_all(handle)
        tables = await host.service.Tables(TablesRequest(max_rows=10), None)
        assert ([each.handle_id for each in tables.unreported], len(tables.handles)) == ([handle.handle_id], 0)
        await anext(writer.client.own(writer.region_id))
        await _until_tables(host.service.Tables, lambda now: not now.unreported)


async def test_what_is_too_much_for_a_table_is_counted(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        for _ in range(5):
            await writer.client.reserve(writer.handle(), writer.region_id, a_layout())
        tables = await host.service.Tables(TablesRequest(max_rows=2), None)
        assert (len(tables.handles), tables.num_left_out) == (2, 3)


async def test_the_arena_is_claimed_by_the_pulls_that_use_it(tmp_path: Path) -> None:
    hosts = running_host(tmp_path), running_host(tmp_path)
    async with hosts[0] as near, hosts[1] as far, running_writer(near) as writer, a_client(far) as reader:
        handle = writer.handle(num_blocks=2)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.client.seal(handle, [writer.slab(0, 0, [0, 1])], closed(2))
        await watch_all(reader, handle, "r-0")
        tables = await far.service.Tables(TablesRequest(max_rows=10), None)
        (row,) = tables.arena
        assert row.num_bytes == tables.arena_used_bytes > 0
        assert tables.handles[0].is_copy
        theirs = await near.service.Tables(TablesRequest(max_rows=10), None)
        assert [each.incarnation for each in theirs.handles[0].readers] == [far.incarnation]
        await reader.release(handle, "r-0")
        await _until_tables(far.service.Tables, lambda now: not now.arena and not now.arena_used_bytes)


async def test_stored_blocks_that_are_lent_are_in_the_table(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        await writer.client.publish(published(writer, chain(2), [0, 1]))
        await reader.load(wanted(chain(2), "someone/r"))
        tables = await host.service.Tables(TablesRequest(max_rows=10), None)
        (lease,) = tables.store_leases
        assert (lease.reader_id, lease.num_bytes) == ("someone/r", host.host_cache.blocks.stats().leased_bytes)
        assert lease.num_bytes > 0
        assert 0 < lease.lease_until_unix_ms - tables.now_unix_ms <= 10_000


async def _until_tables(call: Callable[..., Any], condition: Callable[[TablesReply], bool]) -> None:
    async def holds() -> bool:
        return condition(await call(TablesRequest(max_rows=10), None))

    await until(holds)
