"""Tests of the block store with small memories, literal slots and exact order; four pages unless stated otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kv_transfer_svc.blocks.allocator import PAGE_BYTES, BlockAllocator, Extent
from kv_transfer_svc.blocks.block import KNOWN, BlockKey, BlockState, Known
from kv_transfer_svc.blocks.block_store import BlockStore
from kv_transfer_svc.blocks.evictor import Demote
from kv_transfer_svc.blocks.quotas import Quotas
from tandem_runtime.errors import InvalidRequest, KvCorrupt, KvNotFound
from tests.kv_transfer_svc.blocks.chain import block, chain, name

PAGE = PAGE_BYTES


@pytest.fixture
def allocators() -> Iterator[list[BlockAllocator]]:
    opened: list[BlockAllocator] = []
    yield opened
    for allocator in opened:
        allocator.close()


def store_of(
    allocators: list[BlockAllocator],
    num_pages: int = 4,
    *,
    demote: Demote | None = None,
    quotas: Quotas | None = None,
    headroom_bytes: int = 0,
) -> BlockStore:
    allocators.append(BlockAllocator(num_pages * PAGE))
    return BlockStore(allocators[-1], demote=demote, quotas=quotas, headroom_bytes=headroom_bytes)


def begin(
    store: BlockStore,
    keys: Sequence[BlockKey],
    *,
    num_pages: int = 1,
    tag: bytes = b"",
    now: float = 0.0,
    parent: BlockKey | None = None,
) -> list[Extent | Known | None]:
    begun = store.begin(keys, [num_pages * PAGE] * len(keys), tag, now, parent=parent)
    store.check()
    return begun


def put(
    store: BlockStore, keys: Sequence[BlockKey], *, num_pages: int = 1, tag: bytes = b"", parent: BlockKey | None = None
) -> list[int | None]:
    """Begin and seal; return the slots."""
    slots: list[int | None] = []
    for key, extent in zip(keys, begin(store, keys, num_pages=num_pages, tag=tag, parent=parent), strict=True):
        if isinstance(extent, Extent):
            assert store.seal(key, extent, checksum=7)
        slots.append(extent.slot if isinstance(extent, Extent) else None)
    store.check()
    return slots


def put_each(store: BlockStore, prompts: str) -> list[int | None]:
    """Store the first block of each prompt."""
    return [put(store, [block(prompt, 0)])[0] for prompt in prompts]


def fresh(extent: Extent | Known | None) -> Extent:
    assert isinstance(extent, Extent)
    return extent


def balance(store: BlockStore) -> tuple[int, ...]:
    """free, cached, leased, filling; in pages."""
    store.check()
    now = store.stats()
    return tuple(n // PAGE for n in (now.free_bytes, now.cached_bytes, now.leased_bytes, now.filling_bytes))


def test_a_block_passes_through_every_state_and_leaves_nothing(allocators: list[BlockAllocator]) -> None:
    to_disk: list[tuple[str | None, int, int]] = []

    def demote(key: BlockKey, extent: Extent, checksum: int) -> bool:
        to_disk.append((name(key), extent.slot, checksum))
        return True

    store, key = store_of(allocators, 1, demote=demote), block("a", 0)
    extent = fresh(begin(store, [key])[0])  # 1. being filled
    assert (store.state(key), balance(store), store.find_run([key])) == (BlockState.FILLING, (0, 0, 0, 1), 0)
    store.seal(key, extent, checksum=7)  # 2. cached
    assert (store.state(key), balance(store), store.find_run([key])) == (BlockState.SEALED, (0, 1, 0, 0), 1)
    leased = store.lease([key], "reader", now=0.0, seconds=5.0)[0]  # 3. leased
    assert leased is not None and (leased.extent, leased.checksum) == (extent, 7)
    assert (store.state(key), balance(store)) == (BlockState.LEASED, (0, 0, 1, 0))
    assert begin(store, [block("b", 0)]) == [None]
    assert store.release("reader") == 1  # 4. cached again
    assert begin(store, [block("b", 0)]) == [None]  # 5. on its way to disk: its memory comes later
    assert to_disk == [("a0", 0, 7)]
    assert (store.state(key), balance(store), store.find_run([key])) == (BlockState.DEMOTING, (0, 0, 0, 1), 0)
    assert begin(store, [key, block("b", 0)]) == [KNOWN, None]
    assert len(to_disk) == 1  # nothing more goes for what is to come
    assert store.demoted(key, extent)  # 6. gone
    assert not store.demoted(key, extent)
    assert (store.state(key), balance(store)) == (None, (1, 0, 0, 0))
    after = fresh(begin(store, [block("b", 0)])[0])  # 7. the slot's next life
    assert (after.slot, after.generation) == (0, extent.generation + 1)
    store.discard(block("b", 0), after)
    assert balance(store) == (1, 0, 0, 0)  # nothing is left


def test_what_is_known_is_not_filled_again(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators)
    assert put(store, chain("a", 2)) == [0, 1]
    first, second, third = begin(store, chain("a", 3))
    assert (first, second, fresh(third).slot) == (KNOWN, KNOWN, 2)
    assert begin(store, chain("a", 3)) == [KNOWN, KNOWN, KNOWN]  # the third is being filled
    assert store.find_run(chain("a", 3)) == 2
    assert (store.stats().deduplicated, store.stats().stored) == (5, 2)


def test_the_least_recently_used_end_of_a_chain_goes(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators)
    put(store, chain("a", 2))
    put(store, chain("b", 2))
    store.lease(chain("a", 2), "reader", now=0.0, seconds=1.0)
    store.release("reader")
    assert put(store, chain("c", 1)) == [3]  # b1 went
    assert put(store, chain("d", 1)) == [2]  # b0
    assert put(store, chain("e", 1)) == [1]  # a1
    assert store.find_run(chain("a", 2)) == 1
    assert store.stats().evictions == 3


def test_a_chain_that_grows_keeps_its_beginning(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators, 3)
    assert put(store, chain("a", 2)) == [0, 1]
    assert put(store, chain("b", 1)) == [2]
    assert put(store, [block("a", 2)], parent=block("a", 1)) == [2]  # a1 is older than b0, but needed
    assert put(store, [block("a", 3)], parent=block("a", 2)) == [None]
    assert store.find_run(chain("a", 4)) == 3


def test_after_a_block_that_found_no_room_none_is_taken(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators, 3)
    put(store, [block("a", 3)])
    first, second, third, fourth, fifth = begin(store, chain("a", 5))
    assert (fresh(first).slot, fresh(second).slot, third, fourth, fifth) == (1, 2, None, KNOWN, None)
    assert store.stats().refused == 2


def test_nothing_leased_filling_or_pinned_is_evicted(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators)
    put_each(store, "abc")
    begin(store, [block("d", 0)])
    store.lease([block("a", 0)], "reader", now=0.0, seconds=5.0)
    assert store.pin([block("b", 0), block("?", 0)]) == 1
    assert put(store, [block("e", 0)]) == [2]  # c0 went
    store.lease([block("e", 0)], "reader", now=0.0, seconds=5.0)
    assert put(store, [block("f", 0)]) == [None]
    assert store.unpin([block("b", 0)]) == 1
    assert put(store, [block("f", 0)]) == [1]


def test_a_lease_ends_with_its_reader_its_time_or_its_block(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators)
    put(store, chain("a", 3))
    store.lease(chain("a", 2), "one", now=0.0, seconds=5.0)
    store.lease(chain("a", 3), "two", now=2.0, seconds=5.0)
    store.lease(chain("a", 1), "one", now=3.0, seconds=1.0)  # does not shorten it
    assert balance(store) == (1, 0, 3, 0)
    assert store.expire(4.9) == []
    assert store.orphan_bytes(5.5) == 0
    assert store.orphan_bytes(6.1) == 0  # what "one" still holds is held by "two" too
    assert store.expire(5.0) == ["one"]
    assert balance(store) == (1, 0, 3, 0)
    assert store.orphan_bytes(8.5) == 3 * PAGE
    assert (store.release("two"), store.release("two"), store.release("nobody")) == (3, 0, 0)
    assert balance(store) == (1, 3, 0, 0)
    assert store.stats().leases_expired == 1


def test_a_lease_asked_for_twice_is_one_use(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators)
    put(store, chain("a", 2))
    once = store.lease(chain("a", 3), "reader", now=0.0, seconds=5.0)
    assert store.lease(chain("a", 3), "reader", now=1.0, seconds=5.0) == once
    assert once[2] is None
    assert (store.stats().hits, store.stats().num_leases) == (2, 1)
    assert store.release("reader") == 2


def test_a_lease_names_its_reader_and_lasts(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators)
    with pytest.raises(InvalidRequest, match="name one, and more than 0"):
        store.lease(chain("a", 1), "", now=0.0, seconds=1.0)
    with pytest.raises(InvalidRequest, match="name one, and more than 0"):
        store.lease(chain("a", 1), "reader", now=0.0, seconds=0.0)


def test_who_comes_late_cannot_touch_the_next_fill(allocators: list[BlockAllocator]) -> None:
    store, key = store_of(allocators, 1), block("a", 0)
    first = fresh(begin(store, [key])[0])
    assert store.discard(key, first)
    assert not store.discard(key, first)
    second = fresh(begin(store, [key])[0])
    with pytest.raises(KvNotFound, match="not being filled in slot 0"):
        store.seal(key, first, checksum=7)
    assert not store.discard(key, first)
    assert store.seal(key, second, checksum=8)
    assert not store.drop(key, first)
    assert not store.demoted(key, second)
    assert store.find_run([key]) == 1


def test_a_sealed_block_is_sealed_for_good(allocators: list[BlockAllocator]) -> None:
    store, key = store_of(allocators), block("a", 0)
    extent = fresh(begin(store, [key])[0])
    assert store.seal(key, extent, checksum=7)
    assert not store.seal(key, extent, checksum=7)
    with pytest.raises(KvCorrupt, match="sealed with checksum 0000000000000007, not 0000000000000008"):
        store.seal(key, extent, checksum=8)
    assert not store.discard(key, extent)


def test_a_bad_block_goes_at_once_and_its_readers_can_tell(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators)
    put(store, chain("a", 2))
    leased = store.lease(chain("a", 2), "reader", now=0.0, seconds=5.0)[1]
    assert leased is not None and store.pin(chain("a", 2)) == 2
    assert store.drop(block("a", 1), leased.extent)
    assert not store.allocator.is_current(leased.extent)
    assert balance(store) == (3, 0, 1, 0)
    assert store.release("reader") == 1
    assert store.stats().dropped == 1


def test_an_account_over_its_quota_evicts_its_own_first(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators, 8, quotas=Quotas(None, {b"small": 2 * PAGE, b"tiny": PAGE}))
    put(store, chain("old", 2), tag=b"other")
    assert put(store, chain("a", 2), tag=b"small") == [2, 3]
    assert put(store, chain("b", 1), tag=b"small") == [3]  # a1 went, though there was room and older ones
    assert store.find_run(chain("old", 2)) == 2
    assert put(store, chain("c", 3), tag=b"small") == [2, 3, None]  # a0, b0, but never its own prompt
    assert put(store, chain("d", 1), num_pages=2, tag=b"tiny") == [None]
    assert store.stats().refused_over_quota == 2
    assert balance(store) == (4, 4, 0, 0)


def test_a_quota_does_not_reserve(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators, 2, quotas=Quotas(2 * PAGE))
    put(store, chain("a", 2), tag=b"one")
    assert put(store, chain("b", 1), tag=b"two") == [1]
    assert store.find_run(chain("a", 2)) == 1


def test_a_large_block_finds_room_among_small_ones(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators, 6)
    assert put_each(store, "abcdef") == [0, 1, 2, 3, 4, 5]
    store.lease([block("b", 0)], "reader", now=0.0, seconds=5.0)
    assert put(store, [block("large", 0)], num_pages=3) == [2]  # a has b beside it: c is the first that can, with d, e
    assert [store.find_run([block(prompt, 0)]) for prompt in "abcdef"] == [1, 1, 0, 0, 0, 1]
    assert put(store, [block("huge", 0)], num_pages=7) == [None]
    store.release("reader")
    assert put(store, [block("huge", 0)], num_pages=6) == [0]
    assert balance(store) == (0, 6, 0, 0)


def test_small_blocks_cut_what_a_large_one_left(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators, 6)
    assert put(store, chain("a", 2), num_pages=3) == [0, 3]
    assert put(store, chain("b", 4)) == [3, 4, 5, 0]
    assert balance(store) == (2, 4, 0, 0)


def test_headroom_is_kept_by_evicting_ahead(allocators: list[BlockAllocator]) -> None:
    leaving: list[tuple[BlockKey, Extent]] = []

    def demote(key: BlockKey, extent: Extent, checksum: int) -> bool:
        leaving.append((key, extent))
        return True

    store = store_of(allocators, 4, demote=demote, headroom_bytes=2 * PAGE)
    assert put(store, chain("a", 2)) == [0, 1]
    assert put(store, chain("b", 2)) == [2, 3]  # no memory is waited for
    assert [name(key) for key, _ in leaving] == ["a1", "a0"]
    assert balance(store) == (0, 2, 0, 2)
    for key, extent in leaving:
        store.demoted(key, extent)
    assert balance(store) == (2, 2, 0, 0)


def test_a_block_that_is_on_disk_already_goes_at_once(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators, 1, demote=lambda key, extent, checksum: False)
    put(store, chain("a", 1))
    assert put(store, chain("b", 1)) == [0]
    assert (store.stats().evictions, store.stats().demotions) == (1, 0)


def test_a_demotion_that_fails_to_start_changes_nothing(allocators: list[BlockAllocator]) -> None:
    def demote(key: BlockKey, extent: Extent, checksum: int) -> bool:
        raise RuntimeError("no disk")

    store = store_of(allocators, 1, demote=demote)
    put(store, chain("a", 1))
    with pytest.raises(RuntimeError, match="no disk"):
        begin(store, chain("b", 1))
    assert balance(store) == (0, 1, 0, 0)
    assert store.find_run(chain("a", 1)) == 1


def test_use_without_a_lease_keeps_a_block_too(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators, 2)
    put_each(store, "ab")
    store.touch([block("a", 0), block("unknown", 0)])
    assert put(store, chain("c", 1)) == [1]
    assert store.find_run(chain("a", 1)) == 1


def test_sizes_that_cannot_be_change_nothing(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators)
    put(store, chain("a", 1))
    for keys, sizes, message in (
        (chain("b", 2), [PAGE], "2 blocks with 1 sizes"),
        (chain("b", 1), [0], "cannot have 0 bytes"),
        ([block("b", 0), block("a", 0)], [PAGE, 2 * PAGE], "has 4096 bytes, not 8192"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            store.begin(keys, sizes, b"", 0.0)
    assert balance(store) == (3, 1, 0, 0)


def test_copies_that_never_end_are_orphans(allocators: list[BlockAllocator]) -> None:
    store = store_of(allocators)
    begin(store, chain("a", 1), now=100.0)
    assert store.orphan_bytes(159.0) == 0
    assert store.orphan_bytes(161.0) == PAGE


def test_a_key_has_hashes_of_sixteen_bytes() -> None:
    with pytest.raises(InvalidRequest, match="a layout digest has 16 bytes, not 3"):
        BlockKey(b"abc", 0, bytes(16))
    with pytest.raises(InvalidRequest, match="a block hash has 16 bytes, not 32"):
        BlockKey(bytes(16), 0, bytes(32))
    assert len({BlockKey(bytes(16), 0, bytes(16)), BlockKey(bytes(16), 1, bytes(16))}) == 2
