"""A prompt of any length passes through a small arena: windows are freed as readers acknowledge them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kv_transfer_svc.arena import Arena
from kv_transfer_svc.pull_memory import WindowMemory
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import KvCorrupt, KvNotFound, Overloaded
from tandem_runtime.identity import new_incarnation
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv_handle import HandleState
from tests.kv_transfer_svc.host import Host, a_client, running_host, running_writer, until, watch_all
from tests.kv_transfer_svc.layout import BLOCK_BYTES, a_layout
from tests.kv_transfer_svc.test_two_hosts import bytes_at, sealed_handle, until_everything_is_back
from tests.kv_transfer_svc.writer import Writer

ARENA_BLOCKS = 4
SLOTS = [5, 3, 8, 1, 0, 15, 9, 2, 11, 4, 7, 12]
"""A prompt of three times the arena."""


@dataclass
class TwoHosts:
    """A prompt is sealed on `there` and read on `here`."""

    here: Host
    there: Host
    writer: Writer
    reader: KvClient

    async def read_window(self, watching: AsyncIterator[object], handle: pb.KvHandle, reader_id: str) -> bytes:
        """Read the next window, then acknowledge it."""
        event = await anext(watching)
        assert event.is_window, event  # type: ignore[attr-defined]
        slab = event.slab  # type: ignore[attr-defined]
        content = await bytes_at(self.here, slab)
        await self.reader.acknowledge(handle, reader_id, slab.index + 1)
        return content

    def bytes_of(self, slots: list[int]) -> bytes:
        return b"".join(map(self.writer.block, slots))


@asynccontextmanager
async def two_hosts(folder: Path) -> AsyncIterator[TwoHosts]:
    async with (
        running_host(folder, arena_bytes=ARENA_BLOCKS * BLOCK_BYTES) as here,
        running_host(folder) as there,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        yield TwoHosts(here, there, writer, reader)


async def test_a_prompt_longer_than_the_arena_arrives_equal_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as hosts:
        handle = await sealed_handle(hosts.writer, SLOTS)
        watching = hosts.reader.watch(handle, "r", a_layout(), acknowledges=True)
        content = [await hosts.read_window(watching, handle, "r") for _ in SLOTS]
        assert b"".join(content) == hosts.bytes_of(SLOTS)
        closed = (await anext(watching)).closed
        assert (closed.num_slabs, closed.num_blocks) == (12, 12)
        assert hosts.here.store.counters["bytes_pulled"] == len(SLOTS) * BLOCK_BYTES
        assert await hosts.reader.release(handle, "r") is HandleState.RELEASED
        await until_everything_is_back(hosts.here, hosts.there)


async def test_a_pull_holds_its_share_and_waits_for_its_reader(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as hosts:
        handle = await sealed_handle(hosts.writer, SLOTS)
        watching = hosts.reader.watch(handle, "r", a_layout(), acknowledges=True)
        first, second = await anext(watching), await anext(watching)
        third = asyncio.ensure_future(anext(watching))
        # 1. Two of four blocks are held, and no more are pulled, although the arena has room.
        await until(lambda: bool(hosts.here.service.puller.pulls()[0]._memory._freed._event._waiters))  # type: ignore[attr-defined]
        assert hosts.here.arena.used_bytes == 2 * BLOCK_BYTES and not third.done()
        (record,) = hosts.here.store.live()
        assert record.num_bytes == 2 * BLOCK_BYTES
        # 2. A window that was not copied is not freed; one that was copied is, and gives way to the next.
        generation = hosts.here.arena.region.generation(first.slab.extents[0].slot)
        await hosts.reader.acknowledge(handle, "r", 0)
        assert not third.done()
        await hosts.reader.acknowledge(handle, "r", 1)
        assert (await third).slab.first_block == 2
        # 3. The freed slot has a new generation: a reader that were late would find out.
        assert hosts.here.arena.region.generation(first.slab.extents[0].slot) == generation + 1
        with pytest.raises(KvCorrupt):
            await bytes_at(hosts.here, first.slab)
        assert await bytes_at(hosts.here, second.slab) == hosts.writer.block(SLOTS[1])
        # 4. Repeated and late calls change nothing.
        await hosts.reader.acknowledge(handle, "r", 1)
        await hosts.reader.release(handle, "r")
        with pytest.raises(KvNotFound):
            await hosts.reader.acknowledge(handle, "r", 3)
        await until_everything_is_back(hosts.here, hosts.there)


async def test_pulls_that_together_need_more_than_the_arena_all_end(tmp_path: Path) -> None:
    """Each waits for the arena at times, and none for memory that only another one could free."""
    async with two_hosts(tmp_path) as hosts:
        handles = [await sealed_handle(hosts.writer, SLOTS) for _ in range(5)]

        async def read_all(handle: pb.KvHandle) -> bytes:
            watching = hosts.reader.watch(handle, "r", a_layout(), acknowledges=True)
            content = b"".join([await hosts.read_window(watching, handle, "r") for _ in SLOTS])
            assert (await anext(watching)).HasField("closed")
            await hosts.reader.release(handle, "r")
            return content

        for content in await asyncio.gather(*map(read_all, handles)):
            assert content == hosts.bytes_of(SLOTS)
        await until_everything_is_back(hosts.here, hosts.there)


async def test_a_window_is_kept_until_every_choice_has_copied_it(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as hosts:
        handle = await sealed_handle(hosts.writer, SLOTS, num_readers=2)
        one = hosts.reader.watch(handle, "a", a_layout(), acknowledges=True)
        other = hosts.reader.watch(handle, "b", a_layout(), acknowledges=True)
        contents: dict[str, bytes] = {"a": b"", "b": b""}
        window = await anext(one)
        twin = await anext(other)
        assert twin.slab == window.slab
        await hosts.reader.acknowledge(handle, "a", 1)
        assert await bytes_at(hosts.here, twin.slab) == hosts.writer.block(SLOTS[0])
        await hosts.reader.acknowledge(handle, "b", 1)
        for _ in SLOTS[1:]:
            contents["a"] += await hosts.read_window(one, handle, "a")
            contents["b"] += await hosts.read_window(other, handle, "b")
        assert contents["a"] == contents["b"] == hosts.bytes_of(SLOTS[1:])
        assert hosts.here.store.counters["bytes_pulled"] == len(SLOTS) * BLOCK_BYTES
        for name in ("a", "b"):
            await hosts.reader.release(handle, name)
        await until_everything_is_back(hosts.here, hosts.there)


async def test_a_choice_that_comes_when_windows_are_gone_gets_a_copy_of_its_own(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as hosts:
        handle = await sealed_handle(hosts.writer, SLOTS, num_readers=2)
        one = hosts.reader.watch(handle, "a", a_layout(), acknowledges=True)
        early = [await hosts.read_window(one, handle, "a") for _ in range(3)]
        other = hosts.reader.watch(handle, "b", a_layout(), acknowledges=True)
        late = [await hosts.read_window(other, handle, "b") for _ in SLOTS]
        early += [await hosts.read_window(one, handle, "a") for _ in SLOTS[3:]]
        assert b"".join(early) == b"".join(late) == hosts.bytes_of(SLOTS)
        for name in ("a", "b"):
            await hosts.reader.release(handle, name)
        await until_everything_is_back(hosts.here, hosts.there)


async def test_a_choice_that_dies_or_leaves_does_not_stop_the_other(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as hosts, a_client(hosts.here) as dying:
        handle = await sealed_handle(hosts.writer, SLOTS, num_readers=3)
        one = hosts.reader.watch(handle, "a", a_layout(), acknowledges=True)
        other = dying.watch(handle, "b", a_layout(), acknowledges=True)
        leaving = hosts.reader.watch(handle, "c", a_layout(), acknowledges=True)
        # 1. All three share the copy; the first goes on alone until the pull holds its share.
        first, *_ = [await anext(watching) for watching in (one, other, leaving)]
        content = [await bytes_at(hosts.here, first.slab), await hosts.read_window(one, handle, "a")]
        assert hosts.here.store.num_live == 1
        blocked = asyncio.ensure_future(hosts.read_window(one, handle, "a"))
        # 2. One leaves, one dies: the first one's windows come when the dead one's lease has run out.
        await leaving.aclose()
        await hosts.reader.release(handle, "c")
        assert not blocked.done()
        await other.aclose()
        await dying.close()
        await until(lambda: not any(record.watching["b"] for record in hosts.here.store.live()))
        hosts.here.clock.ahead += 9.0
        await hosts.reader.renew([handle], "a")  # as its process does; of "b" nobody hears
        hosts.here.put_forward(1.5)
        hosts.here.service.sweep()
        content.append(await blocked)
        content += [await hosts.read_window(one, handle, "a") for _ in SLOTS[3:]]
        assert b"".join(content) == hosts.bytes_of(SLOTS)
        await hosts.reader.release_all(handle)
        await until_everything_is_back(hosts.here, hosts.there)


async def test_a_reader_of_the_release_before_gets_the_prompt_at_once_or_a_refusal(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as hosts:
        short = await sealed_handle(hosts.writer, SLOTS[:4])
        events = await watch_all(hosts.reader, short, "r")
        assert not any(event.is_window for event in events)
        await hosts.reader.release(short, "r")
        long = await sealed_handle(hosts.writer, SLOTS)
        with pytest.raises(Overloaded, match="raise --arena-bytes"):
            await watch_all(hosts.reader, long, "r")
        await hosts.reader.release(long, "r")
        await until_everything_is_back(hosts.here, hosts.there)


async def test_blocks_that_the_reader_has_are_in_no_window(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as hosts:
        handle = await sealed_handle(hosts.writer, SLOTS)
        watching = hosts.reader.watch(handle, "r", a_layout(), first_block=5, acknowledges=True)
        content = [await hosts.read_window(watching, handle, "r") for _ in SLOTS[5:]]
        assert b"".join(content) == hosts.bytes_of(SLOTS[5:])
        assert (await anext(watching)).HasField("closed")
        await hosts.reader.release(handle, "r")
        await until_everything_is_back(hosts.here, hosts.there)


async def test_on_one_host_nothing_is_acknowledged(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        client = KvClient(host.address, new_incarnation())
        handle = await sealed_handle(writer, SLOTS)
        async for event in client.watch(handle, "r", a_layout(), acknowledges=True):
            assert not event.is_window
        await client.acknowledge(handle, "r", 6)  # harmless
        await client.close()


@pytest.mark.parametrize(
    ("num_blocks", "parts"),
    [
        (1, [1]),
        (16, [16]),
        (20, [16, 4]),
        (50, [17, 17, 16]),
        (100, [34, 34, 32]),
        (192, [64] * 3),
        (200, [64] * 3 + [8]),
    ],
)
def test_a_slab_is_cut_into_windows_of_1_to_4_mib_and_into_three_at_least(num_blocks: int, parts: list[int]) -> None:
    """Blocks of 64 KiB."""
    group = pb.KvGroup(layers=[0], tokens_per_block=16, bytes_per_block=64 << 10)
    layout = pb.KvLayout(groups=[group])
    arena = Arena("arena-test", 256 << 20)
    try:
        memory = WindowMemory(arena, layout, 16 * num_blocks, 0)
        slab = kv.Slab(num_blocks=num_blocks, num_layers=1, extents=[pb.Extent()] * num_blocks)
        assert [part.num_blocks for part in memory.cut(slab)] == parts
    finally:
        arena.close()
