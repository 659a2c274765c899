"""Tests of the free list and the block allocator: every page is in one run or one hole, and free pages merge."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer_svc.blocks.allocator import PAGE_BYTES, BlockAllocator
from kv_transfer_svc.blocks.free_list import FreeList
from tandem_runtime.errors import InvalidRequest


def test_the_smallest_hole_that_fits_is_cut() -> None:
    pages = FreeList(10)
    assert [pages.allocate(n) for n in (4, 1, 2, 3)] == [0, 4, 5, 7]
    pages.free(0)
    pages.free(5)
    assert pages.allocate(2) == 5
    assert pages.allocate(2) == 0
    assert pages.allocate(3) is None  # only pages 2 and 3 are left
    assert pages.num_free_pages == 2


def test_holes_that_touch_become_one() -> None:
    pages = FreeList(6)
    assert [pages.allocate(2) for _ in range(3)] == [0, 2, 4]
    pages.free(0)
    pages.free(4)
    assert pages.allocate(4) is None
    pages.free(2)
    assert pages.allocate(6) == 0


def test_a_window_names_the_neighbours_that_must_go_too() -> None:
    pages = FreeList(10)
    assert [pages.allocate(n) for n in (2, 2, 2, 2, 2)] == [0, 2, 4, 6, 8]
    pages.free(2)  # 0 0 . . 4 4 6 6 8 8
    assert pages.window(4, 2, lambda start: False) == [4]
    assert pages.window(4, 4, lambda start: False) == [4]  # with the hole before it
    assert pages.window(4, 6, lambda start: True) == [4, 6]
    assert pages.window(4, 6, lambda start: start != 6) == [4, 0]
    assert pages.window(4, 10, lambda start: True) == [4, 6, 8, 0]
    assert pages.window(4, 10, lambda start: start != 8) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 31)), max_size=60))
@settings(deadline=None, max_examples=60)
def test_pages_are_conserved_and_never_given_twice(steps: list[tuple[bool, int, int]]) -> None:
    pages = FreeList(32)
    taken: dict[int, int] = {}
    for is_return, num_pages, choice in steps:
        if is_return and taken:
            start = sorted(taken)[choice % len(taken)]
            del taken[start]
            pages.free(start)
        elif (found := pages.allocate(num_pages)) is not None:
            taken[found] = num_pages
        used = [page for start, length in taken.items() for page in range(start, start + length)]
        assert len(used) == len(set(used))
        assert pages.num_free_pages + len(used) == 32
        pages.check()
    for start in taken:
        pages.free(start)
    assert pages.allocate(32) == 0


def test_a_slot_has_a_new_generation_once_it_is_given_back() -> None:
    allocator = BlockAllocator(4 * PAGE_BYTES)
    before = allocator.allocate(PAGE_BYTES + 1)
    assert before is not None and (before.offset, before.slot, before.generation, before.held_bytes) == (0, 0, 0, 8192)
    assert allocator.free_bytes == 2 * PAGE_BYTES
    allocator.free(before)
    assert not allocator.is_current(before)
    after = allocator.allocate(1)
    assert after is not None and (after.slot, after.generation) == (0, 1)
    allocator.close()


def test_an_allocator_without_a_page_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="give 4096 at least"):
        BlockAllocator(4095)
