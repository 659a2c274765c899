"""A writer whose region holds part of a prompt at once is told what all readers have copied, and reuses those slots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from pathlib import Path

import pytest

from kv_transfer_svc.copied_slabs import CopiedSlabs
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import KvNotFound, Unsupported
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv_handle import HandleState
from tests.kv_transfer_svc.host import a_client, closed, running_host, running_writer, until, watch_all
from tests.kv_transfer_svc.layout import BLOCK_BYTES, a_layout
from tests.kv_transfer_svc.test_two_hosts import bytes_at, until_everything_is_back
from tests.kv_transfer_svc.writer import Writer

TWO_BLOCKS = 2 * BLOCK_BYTES


async def reserve(writer: Writer, handle: pb.KvHandle, max_held_bytes: int = TWO_BLOCKS) -> kv.ReserveReply:
    return await writer.client.reserve(handle, writer.region_id, a_layout(), max_held_bytes=max_held_bytes)


def watch(
    reader: KvClient, handle: pb.KvHandle, name: str, first_block: int = 0
) -> AsyncGenerator[kv.WatchEvent, None]:
    return reader.watch(handle, name, a_layout(), first_block, acknowledges=True)


async def copied(owned: AsyncIterator[object]) -> int:
    """Return the number of slabs in the next event for the owner."""
    event = await asyncio.wait_for(anext(owned), 10)
    assert isinstance(event, kv.OwnerEvent.Copied), event
    return event.num_slabs


async def test_the_owner_is_told_what_every_reader_has_copied(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=3, num_readers=2)
        assert (await reserve(writer, handle)).reports_copied
        owned = writer.client.own(writer.region_id)
        readers = [watch(reader, handle, name) for name in "ab"]
        await writer.client.seal(handle, [writer.slab(0, 0, [5]), writer.slab(1, 1, [6])])
        events = [await anext(each) for each in readers]
        assert all(event.is_window for event in events)
        record = host.store.find(handle)
        # 1. One reader has both slabs, the other the first one.
        await reader.acknowledge(handle, "a", 2)
        assert record.copied.num_by_all == 0
        await reader.acknowledge(handle, "b", 1)
        assert await copied(owned) == 1
        assert record.num_bytes == BLOCK_BYTES == host.store.leased_bytes
        # 2. A repeated or late word changes nothing; the next slab takes the first one's slot.
        await reader.acknowledge(handle, "b", 1)
        await reader.acknowledge(handle, "a", 1)
        await writer.client.seal(handle, [writer.slab(2, 2, [5])], closed(3))
        # 3. One reader needs nothing more: only the other one counts.
        await reader.release(handle, "a")
        await reader.acknowledge(handle, "b", 3)
        assert await copied(owned) == 3
        assert [event async for event in readers[1]][-1].closed.num_blocks == 3
        await reader.release(handle, "b")
        ended = await anext(owned)
        assert isinstance(ended, kv.OwnerEvent.Ended) and ended.state == kv.HANDLE_STATE_RELEASED
        assert not host.store.regions.lent(writer.region_id).copied


async def test_an_owner_that_connects_again_is_told_again(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=3)
        await reserve(writer, handle)
        await writer.client.seal(handle, [writer.slab(0, 0, [5])])
        await anext(watch(reader, handle, "r"))
        await reader.acknowledge(handle, "r", 1)
        for _ in range(2):
            async with aclosing(writer.client.own(writer.region_id)) as owned:
                assert await copied(owned) == 1


async def test_slabs_that_a_reader_has_already_count_as_copied(tmp_path: Path) -> None:
    """Else a ring full of them would wait for a word about slabs that the reader is never sent."""
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=6)
        await reserve(writer, handle)
        owned = writer.client.own(writer.region_id)
        watching = watch(reader, handle, "r", first_block=3)
        first = asyncio.ensure_future(anext(watching))
        await writer.client.seal(handle, [writer.slab(0, 0, [5]), writer.slab(1, 1, [6])])
        while await copied(owned) < 2:
            pass
        await writer.client.seal(handle, [writer.slab(2, 2, [5, 6])])
        assert (await first).slab.first_block == 3
        await reader.acknowledge(handle, "r", 3)
        assert await copied(owned) == 3


async def test_a_reader_that_comes_when_slots_are_used_again_is_refused(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=3)
        await reserve(writer, handle)
        await writer.client.seal(handle, [writer.slab(0, 0, [5])])
        await anext(watch(reader, handle, "r"))
        await reader.acknowledge(handle, "r", 1)
        with pytest.raises(KvNotFound, match="their memory is used again"):
            await anext(watch(reader, handle, "late"))


@pytest.mark.parametrize("is_reserved_first", [True, False])
async def test_a_reader_that_says_nothing_ends_a_handle_that_cannot_pass_at_once(
    is_reserved_first: bool, tmp_path: Path
) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=3)
        if is_reserved_first:
            await reserve(writer, handle)
        watching = asyncio.ensure_future(watch_all(reader, handle, "old"))
        if not is_reserved_first:
            await until(lambda: any(record.watching["old"] for record in host.store.live()))
            await reserve(writer, handle)
        with pytest.raises(Unsupported, match=r"does not say what it has copied: .* --kv-staging-bytes"):
            await watching
        ended = await anext(writer.client.own(writer.region_id))
        assert isinstance(ended, kv.OwnerEvent.Ended) and ended.state == kv.HANDLE_STATE_ABORTED


async def test_a_handle_that_nobody_reads_gives_its_slots_back_while_its_writer_renews(tmp_path: Path) -> None:
    """The readers' KV service was killed before they came: they compute the prompt, and cannot say so."""
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        handle = writer.handle(num_blocks=3)
        await reserve(writer, handle)
        owned = writer.client.own(writer.region_id)
        await writer.client.seal(handle, [writer.slab(0, 0, [5]), writer.slab(1, 1, [6])])
        for _ in range(3):
            await writer.client.renew([handle])
            host.put_forward(7.0)
        ended = await anext(owned)
        assert isinstance(ended, kv.OwnerEvent.Ended) and ended.state == kv.HANDLE_STATE_EXPIRED
        assert host.store.leased_bytes == 0


async def test_a_reader_that_says_nothing_reads_a_prompt_that_fits(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=2)
        await reserve(writer, handle)
        await writer.client.seal(handle, [writer.slab(0, 0, [5, 6])], closed(2))
        assert len(await watch_all(reader, handle, "old")) == 2
        assert await reader.release(handle, "old") is HandleState.RELEASED


async def test_a_region_that_holds_whole_prompts_hears_nothing_of_copies(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=2)
        await reserve(writer, handle, max_held_bytes=0)
        await writer.client.seal(handle, [writer.slab(0, 0, [5, 6])], closed(2))
        event = await anext(watch(reader, handle, "r"))
        assert not event.is_window
        await reader.acknowledge(handle, "r", 1)
        await reader.release(handle, "r")
        assert isinstance(await anext(writer.client.own(writer.region_id)), kv.OwnerEvent.Ended)


async def write_through_one_slot(writer: Writer, handle: pb.KvHandle, num_blocks: int) -> list[bytes]:
    """Seal a prompt block by block, each in the same slot once the one before was copied; return the blocks."""
    blocks = []
    async with aclosing(writer.client.own(writer.region_id)) as owned:
        for index in range(num_blocks):
            writer.region.next_generation(5)
            content = bytes([index + 1]) * BLOCK_BYTES
            writer.region.view(5 * BLOCK_BYTES, BLOCK_BYTES)[:] = content
            blocks.append(content)
            is_last = index == num_blocks - 1
            slabs = [writer.slab(index, index, [5])]
            await writer.client.seal(handle, slabs, closed(num_blocks) if is_last else None)
            while not is_last and await copied(owned) <= index:
                pass
    return blocks


async def test_a_prompt_passes_through_one_slot_to_readers_of_another_host(tmp_path: Path) -> None:
    """The service of that host pulls once for both, and speaks for both; one of them has the first blocks already."""
    async with (
        running_host(tmp_path) as here,
        running_host(tmp_path) as there,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        handle = writer.handle(num_blocks=8, num_readers=2)
        await reserve(writer, handle, BLOCK_BYTES)

        async def read(name: str, first_block: int) -> list[bytes]:
            content = []
            async with aclosing(watch(reader, handle, name, first_block)) as events:
                async for event in events:
                    if event.HasField("slab"):
                        content.append(await bytes_at(here, event.slab))
                        await reader.acknowledge(handle, name, event.slab.index + 1)
            return content

        first = asyncio.ensure_future(read("a", 2))
        await until(lambda: any(record.watching["a"] for record in there.store.live()))
        second = asyncio.ensure_future(read("b", 4))
        written = await write_through_one_slot(writer, handle, 8)
        assert await first == written[2:]
        assert b"".join(await second) == b"".join(written[4:])
        for name in "ab":
            await reader.release(handle, name)
        await until_everything_is_back(here, there)


async def test_the_loss_of_one_reader_lets_the_others_go_on(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=3, num_readers=1)
        await reserve(writer, handle)
        owned = writer.client.own(writer.region_id)
        await writer.client.seal(handle, [writer.slab(0, 0, [5])])
        record = host.store.find(handle)
        host.store.lease(record, "dead")
        await anext(watch(reader, handle, "r"))
        await reader.acknowledge(handle, "r", 1)
        assert record.copied.num_by_all == 0
        host.put_forward(5.0)
        await writer.client.renew([handle])
        await reader.renew([handle], "r")
        host.put_forward(6.0)
        assert await copied(owned) == 1


def readers_of(copies: dict[str, int], followers: Iterable[tuple[str, str]] = ()) -> CopiedSlabs:
    slabs = CopiedSlabs()
    for name, number in copies.items():
        slabs.copied(name, number)
    for leader, follower in followers:
        slabs.follow(leader, [leader, follower])
    return slabs


@pytest.mark.parametrize(
    ("copies", "followers", "leases", "num_released", "num_expected", "expected"),
    [
        ({"a": 3, "b": 2}, (), "ab", 0, 2, 2),
        ({"a": 3}, (), "a", 0, 2, 0),
        ({"a": 3}, (), "a", 1, 2, 3),
        ({"a": 3}, (), "ab", 0, 2, 0),
        ({"a": 3}, [("a", "b")], "ab", 0, 2, 3),
        ({"a": 3}, [("a", "b")], "b", 1, 2, 3),
        ({"a": 3, "replaced": 1}, (), ("a", "replaced"), 0, 1, 1),
        ({}, (), "", 2, 2, 0),
    ],
)
def test_a_slab_counts_as_copied_once_nobody_needs_it(
    copies: dict[str, int],
    followers: list[tuple[str, str]],
    leases: tuple[str, ...],
    num_released: int,
    num_expected: int,
    expected: int,
) -> None:
    slabs = readers_of(copies, followers)
    assert slabs.update(list(leases), num_released, num_expected) == (expected > 0)
    assert slabs.num_by_all == expected
    assert not slabs.update(list(leases), num_released, num_expected)


def test_skipped_slabs_between_copied_ones_are_passed() -> None:
    slabs = CopiedSlabs()
    for index in (0, 2, 3, 5):
        slabs.skipped("r", index)
    seen = []
    for num_slabs in (2, 1, 5):
        slabs.copied("r", num_slabs)
        slabs.update(["r"], 0, 1)
        seen.append(slabs.num_by_all)
    assert seen == [4, 4, 6]


def test_a_count_never_falls() -> None:
    slabs = readers_of({"a": 3})
    assert slabs.update(["a"], 0, 1)
    assert not slabs.update(["a", "b"], 0, 1) and slabs.num_by_all == 3
