"""Tests that blocks of another number of tokens fill the pool's blocks, and nothing that is not theirs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.layout import SourceLayout
from tandem_engine.messages import ImportSlab, Recompute, Reserved, SlabImported, StartDecode
from tests.tandem_engine.scheduling.harness import ROOT, EngineHarness, extent, kv_of, tokens_of

PROMPT = list(range(100, 110))  # two blocks of four, and a half full one


def lay_out(
    harness: EngineHarness, prompt: Sequence[int], size: int, indices: range, group: int = 0, *, cut: Sequence[int] = ()
) -> list[ImportSlab]:
    """Put blocks of `size` tokens into remote slots; return slabs with them, cut before the indices in `cut`."""
    kv = [*kv_of(prompt, group), *[-1] * size]  # a partly filled block has something behind the prompt
    starts = [indices.start, *(index for index in cut if indices.start < index < indices.stop), indices.stop]
    slabs: list[ImportSlab] = []
    for first, end in pairwise(starts):
        slots = range(1000 + len(harness.runner.remote), 1000 + len(harness.runner.remote) + end - first)
        for slot, index in zip(slots, range(first, end), strict=True):
            harness.runner.remote[slot] = kv[index * size : (index + 1) * size]
        layout = SourceLayout(size, "float32", "any", 100)
        slabs.append(ImportSlab("d", len(slabs), first, [extent(slot) for slot in slots], group, layout))
    return slabs


def imported(harness: EngineHarness, slab: ImportSlab) -> SlabImported:
    (event,) = harness.core.handle(slab)
    assert isinstance(event, SlabImported)
    return event


@pytest.mark.parametrize(("size", "num_blocks"), [(2, 5), (8, 2), (16, 1), (3, 4), (5, 2)])
def test_every_token_of_the_prompt_arrives_and_none_is_computed(size: int, num_blocks: int) -> None:
    harness = EngineHarness()
    assert harness.add("d", PROMPT, mode="decode", max_tokens=4, root=ROOT) == [Reserved("d", 0)]
    (slab,) = lay_out(harness, PROMPT, size, range(num_blocks))
    assert imported(harness, slab) == SlabImported("d", 0, 100 * num_blocks)
    harness.core.handle(StartDecode("d", [1010]))
    last = harness.run()[-1]
    assert harness.runner.steps == [[("d", 10, 1)], [("d", 11, 1)], [("d", 12, 1)]]
    assert (last.num_computed_tokens, last.num_generated_tokens) == (0, 3)
    assert harness.counter("blocks_imported") == num_blocks
    harness.assert_nothing_is_left()


def test_tokens_that_are_found_here_are_never_written() -> None:
    harness = EngineHarness()
    harness.add("before", [*PROMPT[:4], 50], max_tokens=1, root=ROOT)
    harness.run()
    assert harness.add("d", PROMPT, mode="decode", max_tokens=2, root=ROOT) == [Reserved("d", 1)]
    (slab,) = lay_out(harness, [7, *PROMPT[1:]], 8, range(2))  # other tokens: what is copied of them is found out
    harness.runner.remote[1000][4:] = kv_of(PROMPT)[4:8]
    harness.runner.remote[1001][:2] = kv_of(PROMPT)[8:]
    imported(harness, slab)
    harness.core.handle(StartDecode("d", [1010]))
    assert tokens_of(harness.run(), "d") == [1011]
    harness.assert_nothing_is_left()


def test_a_prompt_of_which_half_a_block_is_missing_is_computed_from_the_missing_token_on() -> None:
    harness = EngineHarness()
    harness.add("d", PROMPT, mode="decode", max_tokens=2, root=ROOT)
    (slab,) = lay_out(harness, PROMPT, 2, range(3))
    imported(harness, slab)
    harness.core.handle(Recompute("d"))
    assert tokens_of(harness.run(), "d") == [1010, 1011]
    assert harness.runner.steps[0] == [("d", 6, 4)]
    harness.assert_nothing_is_left()


def test_slabs_of_one_request_have_one_size_of_blocks() -> None:
    harness = EngineHarness()
    harness.add("d", PROMPT, mode="decode", max_tokens=2)
    imported(harness, lay_out(harness, PROMPT, 2, range(2))[0])
    (other,) = lay_out(harness, PROMPT, 8, range(2))
    assert imported(harness, other).error == "slab has blocks of 8 tokens, those before had 2"
    beyond = ImportSlab("d", 1, 5, [extent(1)], 0, SourceLayout(2, "float32", "any", 100))
    assert imported(harness, beyond).error == "slab has blocks 5 to 6, the prompt has 5"


def test_a_window_that_begins_within_a_block_is_not_found_by_others() -> None:
    """The writer's blocks begin behind the start of ours: the tokens between never came, and nobody may see them."""
    harness = EngineHarness(num_blocks=64, num_window_groups=1, group_window=5)
    prompt = list(range(100, 118))
    harness.add("d", prompt, mode="decode", max_tokens=2, root=ROOT)
    # The token behind the prompt sees from 14 on: tokens 12 and 13 of our block never come.
    for slab in (*lay_out(harness, prompt, 1, range(18)), *lay_out(harness, prompt, 1, range(14, 18), group=1)):
        assert not imported(harness, slab).error
    harness.core.handle(StartDecode("d", [1018]))
    assert tokens_of(harness.run(), "d") == [1019]
    assert harness.counter("reprefill_tokens") == 0
    # With the first 16 tokens in common, another request would see from 12 on.
    harness.add("next", [*prompt[:16], 7], max_tokens=1, root=ROOT)
    harness.run()
    assert harness.counter("prompt_tokens_cached") == 0
    harness.assert_nothing_is_left()


@settings(deadline=None, max_examples=300)
@given(
    size=st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32]),
    num_tokens=st.integers(1, 60),
    num_known=st.integers(0, 60),
    window=st.none() | st.integers(1, 24),
    has_groups=st.booleans(),
    cut=st.lists(st.integers(1, 60), max_size=3),
    lost=st.none() | st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_whatever_arrives_answers_are_right_and_so_are_those_that_find_its_blocks(
    size: int,
    num_tokens: int,
    num_known: int,
    window: int | None,
    has_groups: bool,
    cut: Sequence[int],
    lost: int | None,
    seed: int,
) -> None:
    num_groups = 2 if window and has_groups else 0
    harness = EngineHarness(
        num_blocks=128,
        window=None if num_groups else window,
        num_window_groups=num_groups or None,
        group_window=window if num_groups else None,
        max_num_batched_tokens=16,
    )
    prompt = list(range(100, 100 + num_tokens))
    harness.add("before", [*prompt[:num_known], 7], max_tokens=1, root=ROOT)
    harness.run()
    (reserved,) = harness.add("d", prompt, mode="decode", max_tokens=3, root=ROOT)
    assert isinstance(reserved, Reserved)
    first, end = reserved.num_cached_blocks * 4 // size, -(-num_tokens // size)
    slabs = []
    for group in range(1 + num_groups):
        seen = max(0, num_tokens - (window or 0) + 1) // size if group else 0
        if max(first, seen) < end:
            slabs += lay_out(harness, prompt, size, range(max(first, seen), end), group, cut=sorted(set(cut)))
    random.Random(seed).shuffle(slabs)
    for number, slab in enumerate(slabs):
        harness.runner.stale_slots = {each.slot for each in slab.extents} if number == lost else set()
        assert not imported(harness, slab).error or number == lost
    harness.core.handle(StartDecode("d", [1000 + num_tokens]))
    assert tokens_of(harness.run(), "d") == [1001 + num_tokens, 1002 + num_tokens]
    if lost is None or lost >= len(slabs):
        assert harness.counter("reprefill_tokens") == 0
    for index, length in enumerate(range(1, num_tokens, 5)):
        harness.add(f"after-{index}", [*prompt[:length], 8], max_tokens=1, root=ROOT)
        harness.run()
    harness.assert_nothing_is_left()
