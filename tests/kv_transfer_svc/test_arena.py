"""Tests of the arena: free + used = total after any allocations and frees."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer_svc.arena import PAGE_BYTES, Arena, ExtentAllocator
from tandem_runtime.errors import Overloaded
from tests.kv_transfer_svc.host import until


def test_the_first_hole_that_fits_is_used_and_neighbours_become_one() -> None:
    pages = ExtentAllocator(10)
    assert [pages.allocate(n) for n in (2, 3, 5)] == [0, 2, 5]
    assert pages.allocate(1) is None
    pages.free(0, 2)
    pages.free(5, 5)
    assert pages.allocate(6) is None  # two holes, of 2 and 5
    assert pages.allocate(5) == 5
    pages.free(5, 5)
    pages.free(2, 3)
    assert pages.allocate(10) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.randoms(use_true_random=False)), max_size=60))
@settings(deadline=None)
def test_pages_are_conserved_and_never_given_twice(steps: list[tuple[bool, int, object]]) -> None:
    pages = ExtentAllocator(32)
    taken: dict[int, int] = {}
    for is_free, num_pages, random in steps:
        if is_free and taken:
            start = random.choice(sorted(taken))  # type: ignore[attr-defined]
            pages.free(start, taken.pop(start))
        elif (found := pages.allocate(num_pages)) is not None:
            taken[found] = num_pages
        used = [page for start, length in taken.items() for page in range(start, start + length)]
        assert len(used) == len(set(used))
        assert pages.num_free_pages + len(used) == 32
    for start, length in taken.items():
        pages.free(start, length)
    assert pages.allocate(32) == 0


async def test_a_freed_extent_has_another_generation() -> None:
    arena = Arena("a", 4 * PAGE_BYTES)
    (before,) = await arena.allocate([100])
    arena.free([before])
    (after,) = await arena.allocate([100])
    assert (after.slot, after.generation) == (before.slot, before.generation + 1)
    arena.free([after])
    arena.close()


async def test_pulls_are_served_in_the_order_they_came() -> None:
    arena = Arena("a", 4 * PAGE_BYTES)
    held = await arena.allocate([PAGE_BYTES] * 3)
    large = asyncio.ensure_future(arena.allocate([PAGE_BYTES] * 4))
    small = asyncio.ensure_future(arena.allocate([PAGE_BYTES]))
    await until(lambda: len(arena._waiting) == 2)
    assert arena.free_bytes == PAGE_BYTES  # the small one would fit, but the large one was first
    arena.free(held)
    arena.free(await large)
    arena.free(await small)
    assert arena.free_bytes == arena.total_bytes
    arena.close()


async def test_a_pull_that_stops_waiting_makes_way_and_keeps_nothing() -> None:
    arena = Arena("a", 4 * PAGE_BYTES)
    held = await arena.allocate([PAGE_BYTES] * 3)
    large = asyncio.ensure_future(arena.allocate([PAGE_BYTES] * 4))
    small = asyncio.ensure_future(arena.allocate([PAGE_BYTES]))
    await until(lambda: len(arena._waiting) == 2)
    large.cancel()
    arena.free(await small)
    granted_and_cancelled = asyncio.ensure_future(arena.allocate([2 * PAGE_BYTES]))
    await until(lambda: len(arena._waiting) == 1)
    arena.free(held)  # grants it
    granted_and_cancelled.cancel()
    await asyncio.gather(large, granted_and_cancelled, return_exceptions=True)
    assert (arena.used_bytes, arena.free_bytes) == (0, arena.total_bytes)
    arena.close()


async def test_what_can_never_fit_is_refused_at_once() -> None:
    arena = Arena("a", 4 * PAGE_BYTES)
    with pytest.raises(Overloaded, match="--arena-bytes"):
        await arena.allocate([PAGE_BYTES + 1] * 3)
    arena.close()
