"""`longest_prefix` loads and returns only the blocks of a prefix that every group of layers has."""

from __future__ import annotations

from collections.abc import Mapping

from tandem_engine.messages import ExtentRef, PrefixBlock
from tandem_worker.kv_offload import longest_prefix


class Store:
    """A store with some blocks of each group."""

    def __init__(self, blocks: Mapping[int, set[int]]) -> None:
        self.blocks = blocks
        self.loads: list[tuple[int, int, int]] = []

    async def load(self, group: int, first: int, end: int) -> list[PrefixBlock]:
        self.loads.append((group, first, end))
        here = self.blocks.get(group, set())
        reached = next((index for index in range(first, end) if index not in here), end)
        return [PrefixBlock(index, ExtentRef("store", index, 1, index, 0), group) for index in range(first, reached)]


async def found(store: Store, num_blocks: int, windows: Mapping[int, int]) -> dict[int, list[int]]:
    by_group: dict[int, list[int]] = {}
    for block in await longest_prefix(store.load, num_blocks, windows):
        by_group.setdefault(block.group, []).append(block.index)
    return by_group


async def test_one_group_is_asked_for_once() -> None:
    store = Store({0: {0, 1, 3}})
    assert await found(store, 5, {}) == {0: [0, 1]}
    assert store.loads == [(0, 0, 5)]


async def test_of_groups_with_a_window_the_last_blocks_are_asked_for() -> None:
    store = Store({0: set(range(9)), 1: set(range(9)), 2: {5, 6, 7, 8}})
    assert await found(store, 8, {1: 3, 2: 3}) == {0: list(range(8)), 1: [5, 6, 7], 2: [5, 6, 7]}
    assert store.loads == [(0, 0, 8), (1, 5, 8), (2, 5, 8)]


async def test_a_gap_in_a_window_makes_the_prefix_shorter() -> None:
    store = Store({0: set(range(9)), 1: set(range(9)), 2: {1, 2, 3, 4, 6, 7}})
    assert await found(store, 8, {1: 3, 2: 3}) == {0: list(range(5)), 1: [2, 3, 4], 2: [2, 3, 4]}
    assert store.loads[-2:] == [(1, 2, 5), (2, 2, 5)]


async def test_a_prompt_within_the_window_needs_all_blocks_of_all_groups() -> None:
    assert await found(Store({0: {0, 1}, 1: {0, 1}}), 2, {1: 3}) == {0: [0, 1], 1: [0, 1]}
    assert await found(Store({0: {0, 1}, 1: {1}}), 2, {1: 3}) == {}
    assert await found(Store({0: {0, 1}, 1: set()}), 2, {1: 0}) == {0: [0, 1]}, "a window of the token itself"


async def test_a_store_full_of_gaps_is_not_asked_for_ever() -> None:
    store = Store({0: set(range(40)), 1: set(range(0, 40, 2))})
    assert await found(store, 40, {1: 3}) == {}
    assert len(store.loads) == 4
