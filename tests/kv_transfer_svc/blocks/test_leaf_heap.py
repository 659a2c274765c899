"""Tests of the eviction order, on sequences short enough to follow with a pencil."""

from __future__ import annotations

from kv_transfer_svc.blocks.leaf_heap import LeafHeap
from tests.kv_transfer_svc.blocks.chain import add, block, chain, evict, name


def test_a_prompt_goes_from_its_end() -> None:
    heap = LeafHeap()
    add(heap, ("a", 3))
    heap.use(chain("a", 3))
    assert evict(heap, 4) == ["a2", "a1", "a0", None]


def test_a_shared_beginning_goes_last() -> None:
    heap = LeafHeap()
    add(heap, ("a", 2))
    heap.add(block("b", 2), block("a", 1))
    heap.add(block("c", 2), block("a", 1))
    assert evict(heap, 4) == ["b2", "c2", "a1", "a0"]


def test_a_busy_leaf_keeps_what_comes_before_it() -> None:
    heap = LeafHeap()
    add(heap, ("a", 2), ("b", 2))
    assert evict(heap, 3, busy="a1") == ["b1", "b0", None]
    assert evict(heap, 3) == ["a1", "a0", None]


def test_what_left_by_itself_is_not_named() -> None:
    heap = LeafHeap()
    add(heap, ("a", 2), ("b", 1))
    heap.remove(block("a", 1))
    heap.remove(block("a", 1))
    heap.use(chain("a", 2))
    assert sorted(map(str, evict(heap, 3))) == ["None", "a0", "b0"]


def test_a_parent_that_comes_back_waits_for_its_children() -> None:
    heap = LeafHeap()
    add(heap, ("a", 3))
    heap.remove(block("a", 0))
    heap.add(block("a", 0), None)
    assert evict(heap, 3) == ["a2", "a1", "a0"]


def test_a_thousand_comings_and_goings_leave_no_trace() -> None:
    heap = LeafHeap()
    add(heap, ("stays", 1))
    for index in range(1000):
        heap.add(block("x", index), None)
        heap.use([block("x", index), block("stays", 0)])
        heap.remove(block("x", index))
    assert len(heap._heap) <= 2 * len(heap) + 70
    assert evict(heap, 2) == ["stays0", None]


def test_lru_takes_what_was_not_used_for_longest() -> None:
    heap = LeafHeap()
    add(heap, ("a", 1), ("b", 1), ("c", 1))
    heap.use([block("a", 0)])
    assert evict(heap, 3) == ["b0", "c0", "a0"]


def test_lru_takes_a_long_answers_end_before_a_prompt_used_since() -> None:
    heap = LeafHeap()
    add(heap, ("a", 2))  # 1. a prompt
    add(heap, ("b", 1))  # 2. another
    heap.add(block("a", 2), block("a", 1))  # 3. the first one's answer grows
    assert evict(heap, 4) == ["b0", "a2", "a1", "a0"]  # the answer keeps its prompt


def test_keys_are_named_as_one_reads_them() -> None:
    assert name(block("a", 3)) == "a3"


def test_only_the_end_of_a_long_prompt_is_in_the_heap() -> None:
    """Else the first victim after it would remove thousands of entries at once, and the loop stand still."""
    heap = LeafHeap()
    add(heap, ("a", 1_000), ("b", 1_000))
    heap.use(chain("a", 1_000))
    assert name(heap.victim(lambda key: False)) == "b999"
    assert len(heap._heap) <= 2
