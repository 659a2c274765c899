"""Tests that every block is in one state, and can be found as long as its content exists."""

from __future__ import annotations

from array import array

import pytest

from tandem_engine.scheduling.block_hash import BlockHash
from tandem_engine.scheduling.block_pool import BlockPool

A, B, C = (BlockHash(bytes([i]) * 16) for i in range(3))


def figures(pool: BlockPool) -> tuple[int, int, int]:
    pool.check()
    return pool.num_free, pool.num_cached, pool.num_used


def test_blocks_are_handed_out_in_order_and_go_back_behind_the_others() -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([0, 1])
    assert pool.allocate(1) == [3]
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(1) is None
    pool.free([3, 1, 0])
    pool.free([2])
    assert figures(pool) == (4, 0, 0)


def test_too_large_an_allocation_changes_nothing() -> None:
    pool = BlockPool(3, 16)
    assert pool.allocate(4) is None
    assert figures(pool) == (3, 0, 0)
    assert list(pool.generations) == [0, 0, 0]


def test_registered_blocks_are_found_after_they_were_freed_and_shared_without_being_written() -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(2) == [0, 1]
    pool.register(0, A)
    pool.register(1, B)
    pool.free([0, 1])
    assert figures(pool) == (2, 2, 0)
    assert pool.find([A, B, C]) == [0, 1]
    assert pool.find([C, A]) == []
    assert pool.num_unused([0, 1]) == 2
    pool.share([0, 1])
    pool.share([0])
    assert pool.num_unused([0, 1]) == 0
    assert figures(pool) == (2, 0, 2)
    assert list(pool.generations) == [1, 1, 0, 0]
    pool.free([0, 1])
    assert figures(pool) == (2, 1, 1)
    pool.free([0])
    assert figures(pool) == (2, 2, 0)


def test_cached_blocks_are_evicted_last_of_the_chain_first_and_only_when_none_is_empty() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(3)
    for block, block_hash in enumerate((A, B, C)):
        pool.register(block, block_hash)
    pool.free([0, 1, 2])
    assert pool.allocate(1) == [3]
    assert pool.find([A, B, C]) == [0, 1, 2]
    assert pool.allocate(1) == [2]
    assert pool.find([A, B, C]) == [0, 1]
    assert pool.allocate(1) == [1]
    assert pool.find([A, B, C]) == [0]
    pool.free([3, 2, 1])
    assert figures(pool) == (3, 1, 0)


def test_content_that_is_known_already_is_not_registered_twice() -> None:
    pool = BlockPool(2, 16)
    pool.allocate(2)
    pool.register(0, A)
    pool.register(1, A)
    pool.free([0])
    pool.free([1])
    assert figures(pool) == (1, 1, 0)
    assert pool.find([A]) == [0]


def test_a_generation_counts_each_time_a_block_is_handed_out_to_be_written() -> None:
    generations = array("Q", [7, 7])
    pool = BlockPool(2, 16, generations)
    pool.allocate(1)
    pool.register(0, A)
    pool.free([0])
    pool.share(pool.find([A]))
    assert list(generations) == [8, 7]
    pool.free([0])
    pool.allocate(2)
    assert list(generations) == [9, 8]
    pool.free([0, 1])
    assert figures(pool) == (2, 0, 0)


def test_held_blocks_are_those_that_nothing_else_uses() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(2)
    pool.register(0, A)
    pool.hold([0, 1])
    assert pool.num_held == 2
    pool.share(pool.find([A]))
    assert pool.num_held == 1
    pool.free([0, 1], held=True)
    assert (pool.num_held, pool.num_used) == (0, 1)
    pool.free([0])
    assert figures(pool) == (3, 1, 0)


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(2, 16)
    pool.allocate(1)
    pool.free([0])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([0])


def test_a_shared_block_with_a_claim_costs_a_spare_one_until_either_gives_it_back() -> None:
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(1) or []
    pool.register(block, BlockHash(b"a" * 16))
    # 1. Shared without a claim, a used block costs nothing, and freeing it returns nothing.
    pool.share([block])
    assert (pool.num_available, pool.num_spare) == (3, 3)
    pool.free([block])
    assert (pool.num_available, pool.num_spare) == (3, 3)
    # 2. With a claim, the first to free it can allocate another block, as if it had not been shared.
    pool.share([block], is_claim=True)
    assert (pool.num_available, pool.num_spare) == (3, 2)
    pool.free([block])
    assert (pool.num_available, pool.num_spare) == (3, 3)
    pool.free([block])
    assert (pool.num_available, pool.num_spare) == (4, 4)
    # 3. For an unused block, a claim is the same as any use.
    pool.share([block], is_claim=True)
    assert (pool.num_available, pool.num_spare) == (3, 3)
    pool.free([block])
    pool.check()


def points(pool: BlockPool) -> tuple[bytes, bytes] | None:
    taken = pool.take_points()
    return None if taken is None else (taken.stored, taken.evicted)


def test_sample_points_are_told_once_and_again_when_they_are_evicted() -> None:
    pool = BlockPool(3, 16)
    pool.allocate(2)
    for block, block_hash in enumerate((A, B)):
        pool.register(block, block_hash)
    # 1. Only what is marked is told, once.
    pool.mark_point(A)
    pool.mark_point(A)
    assert points(pool) == (A[:8], b"")
    assert points(pool) is None
    # 2. A block whose content another block has already is no point of its own; nor is one that nobody has.
    pool.allocate(1)
    pool.register(2, A)
    pool.mark_point(A)
    pool.mark_point(C)
    assert points(pool) is None
    # 3. Cached, it is still there; evicted, it is not.
    pool.free([0, 1, 2])
    pool.check()
    assert points(pool) is None
    assert pool.allocate(3) == [0, 1, 2]
    assert points(pool) == (b"", A[:8])
    # 4. What comes and goes between two calls is not told.
    pool.register(0, C)
    pool.mark_point(C)
    pool.free([0, 1, 2])
    pool.allocate(3)
    assert points(pool) is None
    pool.check()
