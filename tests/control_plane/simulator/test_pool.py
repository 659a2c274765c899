"""Blocks of a simulated pool are shared, kept while there is room, and leave from the end of their chain."""

from __future__ import annotations

from control_plane.simulator.pool import Pool, Store


def test_a_shared_block_counts_once_and_stays_until_its_last_user_leaves() -> None:
    pool = Pool(160, 16)
    pool.take((1, 2), 5)
    pool.take((1, 3), 5)
    assert pool.num_used == 3 * 16 + 10
    pool.release((1, 2), 5)
    assert (pool.num_used, pool.num_cached) == (2 * 16 + 5, 16)
    pool.release((1, 3), 5)
    assert (pool.num_used, pool.num_cached, pool.num_found((1, 2, 9))) == (0, 48, 2)


def test_the_end_of_the_oldest_chain_leaves_first() -> None:
    pool = Pool(64, 16)
    for chain in ((1, 2), (3, 4)):
        pool.take(chain, 0)
        pool.release(chain, 0)
    pool.take((5,), 0)
    assert (pool.num_found((1, 2)), pool.num_found((3, 4))) == (1, 2)
    pool.grow(20)
    assert (pool.num_found((1, 2)), pool.num_found((3, 4)), pool.num_cached) == (0, 1, 16)


def test_room_counts_what_may_leave_and_what_is_shared() -> None:
    pool = Pool(64, 16)
    pool.take((1, 2, 3), 10)
    assert pool.has_room((1, 2), 6)
    assert not pool.has_room((1, 2), 7)
    assert not pool.has_room((4,), 0)
    pool.release((1, 2, 3), 10)
    assert pool.has_room((4, 5, 6, 7), 0)


def test_a_store_keeps_what_was_used_last() -> None:
    store = Store(64, 16)
    store.put((1, 2))
    store.put((3, 4))
    assert store.num_found((1, 2, 9), 0) == 2
    store.put((5,))
    assert (store.num_found((1, 2), 0), store.num_found((3, 4), 0), len(store)) == (2, 1, 4)
    assert store.num_found((9, 1, 2), 1) == 2, "from block 1 on"
