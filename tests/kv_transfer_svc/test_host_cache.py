"""Tests that published blocks come back whole to other workers: from memory, from disk, from another host."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kv_transfer_svc.blocks.block import BlockKey
from kv_transfer_svc.disk import DiskTier
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import InvalidRequest, StaleIncarnation
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.client import KvClient
from tests.kv_transfer_svc.host import Host, a_client, running_host, running_writer, until
from tests.kv_transfer_svc.layout import BLOCK_BYTES
from tests.kv_transfer_svc.writer import Writer

DIGEST = b"layout-of-tests!"
NUM_STORE_BLOCKS = (1 << 20) // BLOCK_BYTES


def chain(length: int, name: str = "prompt") -> list[bytes]:
    """Return the hashes of a prompt's blocks."""
    return [hashlib.blake2b(f"{name} {index}".encode(), digest_size=16).digest() for index in range(length)]


def published(
    writer: Writer, hashes: Sequence[bytes], slots: Sequence[int], parent: bytes = b"", tag: bytes = b""
) -> kv.PublishRequest:
    blocks = [
        kv.StoredBlock(block_hash=block_hash, extent=extent)
        for block_hash, extent in zip(hashes, writer.slab(0, 0, slots).extents, strict=True)
    ]
    return kv.PublishRequest(
        incarnation=writer.incarnation, layout_digest=DIGEST, blocks=blocks, parent_hash=parent, account_tag=tag
    )


def wanted(hashes: Sequence[bytes], reader: str = "reader", source: str = "") -> kv.LoadRequest:
    return kv.LoadRequest(
        layout_digest=DIGEST,
        block_hashes=hashes,
        reader_id=reader,
        source_address=source,
        bytes_per_block=BLOCK_BYTES,
    )


def content(host: Host, reply: kv.LoadReply) -> list[bytes]:
    """Read leased blocks as an engine does: copy, then compare the generation."""
    region = host.host_cache.blocks.allocator.region
    return [region.copy_out(block.extent, 0, block.extent.num_bytes) for block in reply.blocks]


async def fill_with_others(host: Host, writer: Writer, client: KvClient) -> None:
    """Publish other prompts until every earlier block has been evicted, each after the disk has kept up."""
    for number in range(0, NUM_STORE_BLOCKS + 16, 8):
        await client.publish(published(writer, chain(8, f"other {number}"), range(8)))
        await until(lambda: host.host_cache.blocks.stats().demoting_bytes == 0)


async def test_blocks_that_were_published_are_lent_to_anyone_with_their_hashes(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        hashes = chain(4)
        stored = await writer.client.publish(published(writer, hashes, [3, 1, 2, 0]))
        assert (stored.num_stored, stored.num_known, stored.num_refused) == (4, 0, 0)
        # 1. The same content from other slots: nothing is copied.
        again = await writer.client.publish(published(writer, hashes, [4, 5, 6, 7]))
        assert (again.num_stored, again.num_known) == (0, 4)
        # 2. A longer prompt with the same beginning finds the stored blocks.
        reply = await reader.load(wanted([*hashes, *chain(2, "more")]))
        assert [block.index for block in reply.blocks] == [0, 1, 2, 3]
        assert reply.num_from_memory == 4
        assert content(host, reply) == [writer.block(slot) for slot in (3, 1, 2, 0)]
        # 3. Released: no lease is left.
        await reader.unload("reader")
        assert host.host_cache.blocks.stats().leased_bytes == 0
        host.host_cache.blocks.check()


async def test_another_layout_or_salt_finds_nothing(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        await writer.client.publish(published(writer, chain(4), range(4)))
        other = wanted(chain(4))
        other.layout_digest = b"another layout!!"
        assert not (await reader.load(other)).blocks
        assert not (await reader.load(wanted(chain(4, "salted")))).blocks


async def test_a_block_reused_before_it_was_copied_is_not_stored_nor_what_follows_it(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        request = published(writer, chain(4), range(4))
        writer.region.next_generation(2)  # the worker needs the slot for something else
        stored = await writer.client.publish(request)
        assert (stored.num_stored, stored.num_refused) == (2, 2)
        assert len((await reader.load(wanted(chain(4)))).blocks) == 2
        host.host_cache.blocks.check()


async def test_a_lease_that_runs_out_is_harmless(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        await writer.client.publish(published(writer, chain(4), range(4)))
        reply = await reader.load(wanted(chain(4)))
        host.put_forward(61.0)
        assert host.host_cache.blocks.stats().leased_bytes == 0
        await fill_with_others(host, writer, writer.client)
        with pytest.raises(Exception, match="reused"):
            content(host, reply)
        assert not (await reader.load(wanted(chain(4), "later"))).blocks


async def test_leased_blocks_outlast_any_number_of_others(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        await writer.client.publish(published(writer, chain(4), range(4)))
        reply = await reader.load(wanted(chain(4)))
        await fill_with_others(host, writer, writer.client)
        assert content(host, reply) == [writer.block(slot) for slot in range(4)]


async def test_what_memory_has_no_room_for_comes_back_from_disk_verified(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "disk", 16 << 20, 1 << 20)
    async with running_host(tmp_path, disk=disk) as host, running_writer(host) as writer, a_client(host) as reader:
        # 1. Published, then evicted from memory by other blocks.
        await writer.client.publish(published(writer, chain(4), range(4)))
        await fill_with_others(host, writer, writer.client)
        assert host.host_cache.blocks.find_run([BlockKey(DIGEST, 0, each) for each in chain(4)]) == 0
        # 2. Loaded: read from disk into memory, unchanged.
        reply = await reader.load(wanted(chain(4)))
        assert (reply.num_from_memory, reply.num_from_disk) == (0, 4)
        assert content(host, reply) == [writer.block(slot) for slot in range(4)]
        # 3. The second time it comes from memory.
        assert (await reader.load(wanted(chain(4), "second"))).num_from_memory == 4
        host.host_cache.blocks.check()


async def test_a_prompt_larger_than_what_memory_keeps_free_comes_from_disk_whole(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "disk", 16 << 20, 1 << 20)
    hashes = chain(NUM_STORE_BLOCKS // 2)
    async with running_host(tmp_path, disk=disk) as host, running_writer(host) as writer, a_client(host) as reader:
        # 1. In memory: other prompts, not yet on disk. On disk: this one.
        for first in range(0, len(hashes), 8):
            parent = hashes[first - 1] if first else b""
            await writer.client.publish(published(writer, hashes[first : first + 8], range(8), parent))
            await until(lambda: host.host_cache.blocks.stats().demoting_bytes == 0)
        await fill_with_others(host, writer, writer.client)
        assert host.host_cache.blocks.find_run([BlockKey(DIGEST, 0, each) for each in hashes]) == 0
        assert host.host_cache.blocks.stats().free_bytes < len(hashes) * BLOCK_BYTES // 4
        # 2. Room is made for all of it: the others are written to disk first.
        reply = await reader.load(wanted(hashes))
        assert (reply.num_from_memory, reply.num_from_disk) == (0, len(hashes))
        assert content(host, reply) == [writer.block(slot % 8) for slot in range(len(hashes))]
        assert (await reader.load(wanted(chain(8, "other 0")))).num_from_disk == 8
        host.host_cache.blocks.check()


async def test_blocks_from_disk_are_hashed_by_its_thread_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second hash on the event loop took 28 ms for 235 MB, in which no seal and no watch moved."""
    disk = DiskTier(tmp_path / "disk", 16 << 20, 1 << 20)
    async with running_host(tmp_path, disk=disk) as host, running_writer(host) as writer, a_client(host) as reader:
        await writer.client.publish(published(writer, chain(4), range(4)))
        await fill_with_others(host, writer, writer.client)
        hashed: list[int] = []
        monkeypatch.setattr("kv_transfer_svc.host_cache.block_checksum", lambda block: hashed.append(len(block)))
        reply = await reader.load(wanted(chain(4)))
        assert reply.num_from_disk == 4 and hashed == []
        assert [block.checksum for block in reply.blocks] == [block_checksum(each) for each in content(host, reply)]


async def test_the_disk_tier_survives_the_service(tmp_path: Path) -> None:
    first = DiskTier(tmp_path / "disk", 16 << 20, 1 << 20)
    async with running_host(tmp_path, disk=first) as host, running_writer(host) as writer:
        await writer.client.publish(published(writer, chain(4), range(4)))
        blocks = [writer.block(slot) for slot in range(4)]
        await fill_with_others(host, writer, writer.client)
    second = DiskTier(tmp_path / "disk", 16 << 20, 1 << 20)
    async with running_host(tmp_path, disk=second) as host, a_client(host) as reader:
        reply = await reader.load(wanted(chain(4)))
        assert reply.num_from_disk == 4
        assert content(host, reply) == blocks


async def test_another_hosts_blocks_are_fetched_where_the_request_names_it(tmp_path: Path) -> None:
    async with running_host(tmp_path) as far, running_host(tmp_path) as near, running_writer(far) as writer:
        await writer.client.publish(published(writer, chain(5), range(5)))
        async with a_client(near) as reader:
            assert not (await reader.load(wanted(chain(6), "asks nobody"))).blocks
            reply = await reader.load(wanted(chain(6), source=far.address))
            assert (reply.num_from_memory, reply.num_from_host) == (0, 5)
            assert content(near, reply) == [writer.block(slot) for slot in range(5)]
            # No lease stays on the far host, and the blocks are here now.
            assert far.host_cache.blocks.stats().num_leases == 0
            assert (await reader.load(wanted(chain(6), "again"))).num_from_memory == 5


async def test_a_host_that_does_not_answer_costs_nothing_but_time(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        await writer.client.publish(published(writer, chain(2), range(2)))
        reply = await reader.load(wanted(chain(4), source="127.0.0.1:1"))
        assert len(reply.blocks) == 2
        host.host_cache.blocks.check()
        assert host.host_cache.counters["fetch_failures"] == 1


async def test_a_bit_that_flips_in_memory_is_found_where_all_is_verified(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path, verify_kv=True) as host,
        running_writer(host) as writer,
        a_client(host) as reader,
    ):
        await writer.client.publish(published(writer, chain(4), range(4)))
        (second,) = [block for block in (await reader.load(wanted(chain(4)))).blocks if block.index == 1]
        await reader.unload("reader")
        with host.host_cache.blocks.allocator.region.view(second.extent.offset, 1) as byte:
            byte[0] ^= 0x10
        assert len((await reader.load(wanted(chain(4), "later"))).blocks) == 1
        assert host.host_cache.counters["memory_corrupt"] == 1
        host.host_cache.blocks.check()


async def test_extents_outside_the_workers_own_region_are_refused(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        outside = published(writer, chain(1), [0])
        outside.blocks[0].extent.offset = writer.region.total_bytes
        with pytest.raises(InvalidRequest, match="is not in"):
            await writer.client.publish(outside)
        stale = published(writer, chain(1), [0])
        stale.incarnation = "an earlier life"
        with pytest.raises(StaleIncarnation):
            await writer.client.publish(stale)
        host.host_cache.blocks.check()


async def test_a_long_chain_is_loaded_in_runs_between_which_others_get_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer_svc.host_cache._RUN_LENGTH", 4)
    monkeypatch.setattr("kv_transfer_svc.host_cache._UNITS_PER_TURN", 4)
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        await writer.client.publish(published(writer, chain(14), range(14)))
        turns: list[int] = [0]
        calls: list[tuple[int, int]] = []
        lease = host.host_cache.blocks.lease

        def noted(keys: Sequence[BlockKey], *args: Any) -> Any:
            calls.append((len(keys), turns[-1]))
            return lease(keys, *args)

        async def take_turns() -> None:
            while True:
                turns.append(turns[-1] + 1)
                await asyncio.sleep(0)

        monkeypatch.setattr(host.host_cache.blocks, "lease", noted)
        other = asyncio.create_task(take_turns())
        request = wanted([*chain(14), *chain(2, "more")])
        request.lease_ms = 10_000
        reply = await host.host_cache.load(request)
        other.cancel()
        assert [block.index for block in reply.blocks] == list(range(14))
        assert content(host, reply) == [writer.block(slot) for slot in range(14)]
        assert [num_keys for num_keys, _ in calls] == [4, 4, 4, 2]
        seen = [turn for _, turn in calls]
        assert seen == sorted(set(seen)), "the other task ran between any two runs"
        host.host_cache.blocks.check()
