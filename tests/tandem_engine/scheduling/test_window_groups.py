"""Tests that layers with a window free the blocks behind it, and that the other layers keep theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from tandem_engine.messages import Mode, PrefixBlock, Recompute, ReleaseHeld, Reserved, StartDecode
from tandem_engine.scheduling.block_hash import BlockHash, hash_blocks
from tandem_engine.scheduling.request import Request
from tests.tandem_engine.scheduling.harness import ROOT, EngineHarness, extent, kv_of, slab, tokens_of

PROMPT = list(range(24))  # six blocks of four


def used_blocks(harness: EngineHarness) -> list[int]:
    """Step to the end; return how many blocks were used after each step."""
    used = []
    while harness.core.has_work():
        used.append(harness.step().stats.num_used_blocks)
    return used


def tables(harness: EngineHarness, request_id: str) -> list[list[int]]:
    """Return a request's block tables; those of groups with a window without dropped blocks."""
    request = request_of(harness, request_id)
    return [request.block_table, *(table[request.num_dropped_blocks :] for table in request.window_tables)]


def request_of(harness: EngineHarness, request_id: str) -> Request:
    return harness.core.scheduler._requests[request_id]


def hashes_of(tokens: Sequence[int]) -> list[BlockHash]:
    return hash_blocks(ROOT, tokens, 4)


def lay_ready(
    harness: EngineHarness, indices: Iterable[int], window_indices: Iterable[int], tokens: Sequence[int] = PROMPT
) -> list[PrefixBlock]:
    """Put blocks of group 0 and of the other groups into remote slots."""
    prefix = []
    for group in range(1 + harness.core.scheduler._kv.groups.num_groups):
        kv = kv_of(tokens, group)
        for index in window_indices if group else indices:
            slot = 1000 + len(harness.runner.remote)
            harness.runner.remote[slot] = kv[4 * index : 4 * index + 4]
            prefix.append(PrefixBlock(index, extent(slot), group))
    return prefix


def test_blocks_behind_the_window_come_back_while_the_answer_grows() -> None:
    harness = EngineHarness(num_blocks=32, num_window_groups=2, group_window=7)
    harness.add("a", PROMPT[:8], max_tokens=12)
    # Two groups have 2, 3, 2, 2, 2, 3, ... each, as if all layers had the window; the first has 2, 3, 3, 3, 3, 4 ...
    assert used_blocks(harness) == [6, 9, 7, 7, 7, 10, 8, 8, 8, 11, 9, 0]
    harness.assert_nothing_is_left()


def test_groups_take_their_blocks_from_one_pool() -> None:
    harness = EngineHarness(num_blocks=32, num_window_groups=2, group_window=5, max_num_batched_tokens=8)
    harness.add("a", PROMPT, max_tokens=9)
    # 1. Group 0 has blocks for all known tokens; the others for the first run and the window behind it.
    harness.core.scheduler.schedule()
    assert tables(harness, "a") == [[0, 1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11]]
    harness = EngineHarness(num_blocks=32, num_window_groups=2, group_window=5, max_num_batched_tokens=8)
    harness.add("a", PROMPT, max_tokens=9)
    # 2. Behind eight tokens the next sees from 4 on, behind sixteen from 12 on.
    harness.step()
    assert tables(harness, "a") == [[0, 1, 2, 3, 4, 5], [7, 8], [10, 11]]
    harness.step()
    assert tables(harness, "a") == [[0, 1, 2, 3, 4, 5], [12], [13]]
    assert request_of(harness, "a").num_dropped_blocks == 3
    harness.run()
    harness.assert_nothing_is_left()


def test_a_prefix_is_found_as_far_as_all_groups_have_what_its_end_sees() -> None:
    harness = EngineHarness(num_blocks=21, num_window_groups=2, group_window=6)
    harness.add("a", PROMPT, max_tokens=1, root=ROOT)
    harness.run()
    assert harness.pool.num_cached == 18
    # 1. Five blocks are known, and of the groups with a window the last two of them suffice.
    harness.add("b", PROMPT, max_tokens=1, root=ROOT)
    done = harness.step()
    assert harness.last_runs() == [("b", 20, 4)]
    assert (done.outputs[0].num_cached_tokens, done.outputs[0].num_computed_tokens) == (20, 4)
    # 2. Without the blocks of one group for places 3 to 5, what lies before them is found.
    blocks = [harness.pool._found[harness.core.scheduler._kv.groups.key(each, 2)] for each in hashes_of(PROMPT)[3:]]
    for block in blocks:
        harness.pool._cached.move_to_end(block, last=False)
    harness.add("evicts", [99] * 8, max_tokens=1)  # three blocks were free, those of the last place that b computed
    harness.run()
    assert [harness.pool._hashes[block] for block in blocks] == [None] * 3
    harness.add("c", PROMPT, max_tokens=1, root=ROOT)
    harness.run()
    assert harness.last_runs() == [("c", 12, 12)]
    harness.assert_nothing_is_left()


def test_what_lies_ready_is_loaded_as_far_as_windows_reach_back() -> None:
    modes: tuple[Mode, ...] = ("aggregated", "prefill")
    for mode in modes:
        harness = EngineHarness(num_blocks=32, num_window_groups=1, group_window=6, max_num_batched_tokens=8)
        prefix = lay_ready(harness, range(5), range(3, 5))
        harness.add("a", PROMPT, max_tokens=2, root=ROOT, mode=mode, prefix=prefix)
        harness.step()
        assert harness.last_runs() == [("a", 20, 4)]
        assert len(harness.runner.imported) == 5 + 2
        harness.run()
        harness.core.handle(ReleaseHeld("a"))
        harness.assert_nothing_is_left()


def test_a_gap_in_what_lies_ready_ends_it_where_the_windows_are_whole() -> None:
    harness = EngineHarness(num_blocks=32, num_window_groups=1, group_window=6)
    harness.add("a", PROMPT, max_tokens=2, root=ROOT, prefix=lay_ready(harness, range(5), [0, 1, 3, 4]))
    harness.step()  # 2 is missing, so that nothing behind it can be used but from 5 on, which sees 3 and 4
    assert harness.last_runs() == [("a", 20, 4)]
    harness.add(
        "b", [7, *PROMPT], max_tokens=2, root=ROOT, prefix=lay_ready(harness, range(5), [0, 1, 3], [7, *PROMPT])
    )
    harness.step()
    assert harness.last_runs()[-1] == ("b", 8, 17)
    harness.run()
    harness.assert_nothing_is_left()


def test_a_prefix_that_is_gone_is_computed() -> None:
    harness = EngineHarness(num_blocks=32, num_window_groups=1, group_window=6, max_num_batched_tokens=8)
    prefix = lay_ready(harness, range(5), range(3, 5))
    harness.runner.stale_slots = {prefix[-1].extent.slot}
    harness.add("a", PROMPT, max_tokens=2, root=ROOT, prefix=prefix)
    assert tokens_of(harness.run(), "a") == [1024, 1025]
    assert harness.counter("prompt_tokens_computed") == 24
    harness.assert_nothing_is_left()


def test_a_prefill_hands_over_what_the_answer_sees_and_holds_no_more() -> None:
    harness = EngineHarness(num_blocks=18, num_window_groups=2, group_window=5, max_num_batched_tokens=8)
    harness.add("p", PROMPT, mode="prefill", root=ROOT)
    sealed = []
    while harness.core.has_work():
        done = harness.step()
        sealed += [(each.group, each.first_block, len(each.slots), each.is_last) for each in done.sealed]
    # The token at 24 sees from 20 on.
    assert sealed == [(0, 0, 2, False), (0, 2, 2, False), (2, 5, 1, False), (1, 5, 1, False), (0, 4, 2, True)]
    assert done.stats.num_held_blocks == 6 + 2 * 1
    harness.core.scheduler.release_held("p")
    harness.assert_nothing_is_left()


def import_prompt(harness: EngineHarness, first_of_windows: int, groups: range, request_id: str = "d") -> None:
    for group in groups:
        first = first_of_windows if group else 0
        slots = range(100 * group + first, 100 * group + 6)
        kv = kv_of(PROMPT, group)
        harness.runner.remote |= {slot: kv[4 * (slot % 100) : 4 * (slot % 100) + 4] for slot in slots}
        harness.core.handle(slab(request_id, first, slots, slab_index=group, group=group))


def test_a_decode_request_takes_room_for_what_is_handed_over() -> None:
    harness = EngineHarness(num_blocks=21, num_window_groups=2, group_window=5)
    (reserved,) = harness.add("d", PROMPT, mode="decode", max_tokens=4, root=ROOT)
    assert reserved == Reserved("d", 0)
    assert harness.pool.num_used == 7 + 2 * 2
    import_prompt(harness, 5, range(3))
    harness.core.handle(StartDecode("d", [1024]))
    assert tokens_of(harness.run(), "d") == [1025, 1026, 1027]
    assert (harness.counter("reprefill_tokens"), harness.counter("blocks_imported")) == (0, 6 + 2)
    harness.assert_nothing_is_left()


@pytest.mark.parametrize("groups", [range(0), range(2), range(1, 3)])
def test_a_decode_request_computes_its_prompt_if_a_group_does_not_come(groups: range) -> None:
    harness = EngineHarness(num_blocks=24, num_window_groups=2, group_window=5, max_num_batched_tokens=8)
    harness.add("d", PROMPT, mode="decode", max_tokens=4, root=ROOT)
    import_prompt(harness, 5, groups)
    harness.core.handle(Recompute("d"))
    assert tokens_of(harness.run(), "d") == [1024, 1025, 1026, 1027]
    assert harness.counter("reprefill_tokens") == 24
    harness.assert_nothing_is_left()


def test_a_slab_of_a_group_that_the_model_has_not_is_refused() -> None:
    harness = EngineHarness(num_blocks=24, num_window_groups=2, group_window=5)
    harness.add("d", PROMPT, mode="decode", max_tokens=4)
    (event,) = harness.core.handle(slab("d", 0, range(6), group=3))
    assert "group 3" in event.error  # type: ignore[union-attr]
    harness.core.scheduler.abort("d")
    harness.assert_nothing_is_left()


def test_a_decode_that_lost_its_windows_has_its_turn_and_stops_no_newcomer() -> None:
    harness = EngineHarness(num_blocks=400, max_num_seqs=2, num_window_groups=1, group_window=5)

    def start(name: str) -> None:
        harness.add(name, PROMPT, mode="decode", max_tokens=10, root=ROOT)
        import_prompt(harness, 5, range(2), name)
        harness.core.handle(StartDecode(name, [1024]))

    for number in range(5):
        start(f"d{number}")
    harness.add("lost", PROMPT, mode="decode", max_tokens=4)
    harness.core.handle(Recompute("lost"))
    (reserved,) = harness.add("new", PROMPT, mode="decode", max_tokens=4)
    assert isinstance(reserved, Reserved)
    harness.core.scheduler.abort("new")
    for number in range(5, 9):
        start(f"d{number}")
    harness.run()
    starts = list(dict.fromkeys(name for step in harness.runner.steps for name, _, _ in step))
    assert starts == ["d0", "d1", "d2", "d3", "d4", "lost", "d5", "d6", "d7", "d8"]
    harness.assert_nothing_is_left()


def test_a_prompt_that_would_lack_blocks_half_way_is_not_begun() -> None:
    harness = EngineHarness(60, num_window_groups=2, group_window=2, max_num_batched_tokens=7)
    taken = harness.pool.allocate(51)
    assert taken is not None
    harness.add("r", list(range(20)), max_tokens=2)
    for _ in range(20):
        if harness.core.has_work():
            harness.step()
    assert harness.counter("preemptions") == 0
    harness.pool.free(taken)
    harness.core.scheduler.abort("nobody")  # blocks came free: as any command says
    assert tokens_of(harness.run(), "r") == [1020, 1021]
