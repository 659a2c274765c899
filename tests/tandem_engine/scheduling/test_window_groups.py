"""Tests that layers with a window free the blocks behind it, and that the other layers keep theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from tandem_engine.messages import Mode, PrefixBlock, Recompute, ReleaseHeld, Reserved, StartDecode
from tandem_engine.scheduling.block_hash import BlockHash, hash_blocks
from tandem_engine.scheduling.request import Request
from tests.tandem_engine.scheduling.harness import ROOT, World, extent, kv_of, slab, tokens_of

PROMPT = list(range(24))  # six blocks of four


def used_blocks(world: World) -> list[int]:
    """Step to the end; return how many blocks were used behind each step."""
    used = []
    while world.core.has_work():
        used.append(world.step().stats.num_used_blocks)
    return used


def tables(world: World, request_id: str) -> list[list[int]]:
    """Return a request's block tables, those of groups with a window without what was dropped."""
    request = request_of(world, request_id)
    return [request.block_table, *(table[request.num_dropped_blocks :] for table in request.window_tables)]


def request_of(world: World, request_id: str) -> Request:
    return world.core.scheduler._requests[request_id]


def hashes_of(tokens: Sequence[int]) -> list[BlockHash]:
    return hash_blocks(ROOT, tokens, 4)


def lay_ready(
    world: World, indices: Iterable[int], window_indices: Iterable[int], tokens: Sequence[int] = PROMPT
) -> list[PrefixBlock]:
    """Let another process have blocks of group 0 and of the further ones."""
    prefix = []
    for group in range(1 + world.core.scheduler._kv.groups.num_groups):
        kv = kv_of(tokens, group)
        for index in window_indices if group else indices:
            slot = 1000 + len(world.runner.remote)
            world.runner.remote[slot] = kv[4 * index : 4 * index + 4]
            prefix.append(PrefixBlock(index, extent(slot), group))
    return prefix


def test_blocks_behind_the_window_come_back_while_the_answer_grows() -> None:
    world = World(num_blocks=32, num_window_groups=2, group_window=7)
    world.add("a", PROMPT[:8], max_tokens=12)
    # Two groups have 2, 3, 2, 2, 2, 3, ... each, as if all layers had the window; the first has 2, 3, 3, 3, 3, 4 ...
    assert used_blocks(world) == [6, 9, 7, 7, 7, 10, 8, 8, 8, 11, 9, 0]
    world.assert_nothing_is_left()


def test_groups_take_their_blocks_from_one_pool() -> None:
    world = World(num_blocks=32, num_window_groups=2, group_window=5, max_num_batched_tokens=8)
    world.add("a", PROMPT, max_tokens=9)
    # 1. All known tokens have a place in group 0; in the others, the first run and the window that it leaves behind.
    world.core.scheduler.schedule()
    assert tables(world, "a") == [[0, 1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11]]
    world = World(num_blocks=32, num_window_groups=2, group_window=5, max_num_batched_tokens=8)
    world.add("a", PROMPT, max_tokens=9)
    # 2. Behind eight tokens the next sees from 4 on, behind sixteen from 12 on.
    world.step()
    assert tables(world, "a") == [[0, 1, 2, 3, 4, 5], [7, 8], [10, 11]]
    world.step()
    assert tables(world, "a") == [[0, 1, 2, 3, 4, 5], [12], [13]]
    assert request_of(world, "a").num_dropped_blocks == 3
    world.run()
    world.assert_nothing_is_left()


def test_a_prefix_is_found_as_far_as_all_groups_have_what_its_end_sees() -> None:
    world = World(num_blocks=21, num_window_groups=2, group_window=6)
    world.add("a", PROMPT, max_tokens=1, root=ROOT)
    world.run()
    assert world.pool.num_cached == 18
    # 1. Five blocks are known, and of the groups with a window the last two of them suffice.
    world.add("b", PROMPT, max_tokens=1, root=ROOT)
    done = world.step()
    assert world.last_runs() == [("b", 20, 4)]
    assert (done.outputs[0].num_cached_tokens, done.outputs[0].num_computed_tokens) == (20, 4)
    # 2. Without the blocks of one group for places 3 to 5, what lies before them is found.
    blocks = [world.pool._found[world.core.scheduler._kv.groups.key(each, 2)] for each in hashes_of(PROMPT)[3:]]
    for block in blocks:
        world.pool._cached.move_to_end(block, last=False)
    world.add("evicts", [99] * 8, max_tokens=1)  # three blocks were free, those of the last place that b computed
    world.run()
    assert [world.pool._hashes[block] for block in blocks] == [None] * 3
    world.add("c", PROMPT, max_tokens=1, root=ROOT)
    world.run()
    assert world.last_runs() == [("c", 12, 12)]
    world.assert_nothing_is_left()


def test_what_lies_ready_is_loaded_as_far_as_windows_reach_back() -> None:
    modes: tuple[Mode, ...] = ("aggregated", "prefill")
    for mode in modes:
        world = World(num_blocks=32, num_window_groups=1, group_window=6, max_num_batched_tokens=8)
        prefix = lay_ready(world, range(5), range(3, 5))
        world.add("a", PROMPT, max_tokens=2, root=ROOT, mode=mode, prefix=prefix)
        world.step()
        assert world.last_runs() == [("a", 20, 4)]
        assert len(world.runner.imported) == 5 + 2
        world.run()
        world.core.handle(ReleaseHeld("a"))
        world.assert_nothing_is_left()


def test_a_gap_in_what_lies_ready_ends_it_where_the_windows_are_whole() -> None:
    world = World(num_blocks=32, num_window_groups=1, group_window=6)
    world.add("a", PROMPT, max_tokens=2, root=ROOT, prefix=lay_ready(world, range(5), [0, 1, 3, 4]))
    world.step()  # 2 is missing, so that nothing behind it can be used but from 5 on, which sees 3 and 4
    assert world.last_runs() == [("a", 20, 4)]
    world.add("b", [7, *PROMPT], max_tokens=2, root=ROOT, prefix=lay_ready(world, range(5), [0, 1, 3], [7, *PROMPT]))
    world.step()
    assert world.last_runs()[-1] == ("b", 8, 17)
    world.run()
    world.assert_nothing_is_left()


def test_a_prefix_that_is_gone_is_computed() -> None:
    world = World(num_blocks=32, num_window_groups=1, group_window=6, max_num_batched_tokens=8)
    prefix = lay_ready(world, range(5), range(3, 5))
    world.runner.stale_slots = {prefix[-1].extent.slot}
    world.add("a", PROMPT, max_tokens=2, root=ROOT, prefix=prefix)
    assert tokens_of(world.run(), "a") == [1024, 1025]
    assert world.counter("prompt_tokens_computed") == 24
    world.assert_nothing_is_left()


def test_a_prefill_hands_over_what_the_answer_sees_and_holds_no_more() -> None:
    world = World(num_blocks=18, num_window_groups=2, group_window=5, max_num_batched_tokens=8)
    world.add("p", PROMPT, mode="prefill", root=ROOT)
    sealed = []
    while world.core.has_work():
        done = world.step()
        sealed += [(each.group, each.first_block, len(each.slots), each.is_last) for each in done.sealed]
    # The token at 24 sees from 20 on.
    assert sealed == [(0, 0, 2, False), (0, 2, 2, False), (2, 5, 1, False), (1, 5, 1, False), (0, 4, 2, True)]
    assert done.stats.num_held_blocks == 6 + 2 * 1
    world.core.scheduler.release_held("p")
    world.assert_nothing_is_left()


def import_prompt(world: World, first_of_windows: int, groups: range, request_id: str = "d") -> None:
    for group in groups:
        first = first_of_windows if group else 0
        slots = range(100 * group + first, 100 * group + 6)
        kv = kv_of(PROMPT, group)
        world.runner.remote |= {slot: kv[4 * (slot % 100) : 4 * (slot % 100) + 4] for slot in slots}
        world.core.handle(slab(request_id, first, slots, slab_index=group, group=group))


def test_a_decode_request_takes_room_for_what_is_handed_over() -> None:
    world = World(num_blocks=21, num_window_groups=2, group_window=5)
    (reserved,) = world.add("d", PROMPT, mode="decode", max_tokens=4, root=ROOT)
    assert reserved == Reserved("d", 0)
    assert world.pool.num_used == 7 + 2 * 2
    import_prompt(world, 5, range(3))
    world.core.handle(StartDecode("d", [1024]))
    assert tokens_of(world.run(), "d") == [1025, 1026, 1027]
    assert (world.counter("reprefill_tokens"), world.counter("blocks_imported")) == (0, 6 + 2)
    world.assert_nothing_is_left()


@pytest.mark.parametrize("groups", [range(0), range(2), range(1, 3)])
def test_a_decode_request_computes_its_prompt_if_a_group_does_not_come(groups: range) -> None:
    world = World(num_blocks=24, num_window_groups=2, group_window=5, max_num_batched_tokens=8)
    world.add("d", PROMPT, mode="decode", max_tokens=4, root=ROOT)
    import_prompt(world, 5, groups)
    world.core.handle(Recompute("d"))
    assert tokens_of(world.run(), "d") == [1024, 1025, 1026, 1027]
    assert world.counter("reprefill_tokens") == 24
    world.assert_nothing_is_left()


def test_a_slab_of_a_group_that_the_model_has_not_is_refused() -> None:
    world = World(num_blocks=24, num_window_groups=2, group_window=5)
    world.add("d", PROMPT, mode="decode", max_tokens=4)
    (event,) = world.core.handle(slab("d", 0, range(6), group=3))
    assert "group 3" in event.error  # type: ignore[union-attr]
    world.core.scheduler.abort("d")
    world.assert_nothing_is_left()


def test_a_decode_that_lost_its_windows_waits_for_no_seat_and_stops_no_newcomer() -> None:
    world = World(num_blocks=400, max_num_seqs=2, num_window_groups=1, group_window=5)
    for number in range(5):
        world.add(f"d{number}", PROMPT, mode="decode", max_tokens=100, root=ROOT)
        import_prompt(world, 5, range(2), f"d{number}")
        world.core.handle(StartDecode(f"d{number}", [1024]))
    world.add("lost", PROMPT, mode="decode", max_tokens=4)
    world.core.handle(Recompute("lost"))
    (reserved,) = world.add("new", PROMPT, mode="decode", max_tokens=4)
    assert isinstance(reserved, Reserved)
    for _ in range(20):
        world.step()
    assert "lost" not in world.core.scheduler._requests, "it has been answered, although five others run"


def test_a_prompt_that_would_lack_blocks_half_way_is_not_begun() -> None:
    world = World(60, num_window_groups=2, group_window=2, max_num_batched_tokens=7)
    taken = world.pool.allocate(51)
    assert taken is not None
    world.add("r", list(range(20)), max_tokens=2)
    for _ in range(20):
        if world.core.has_work():
            world.step()
    assert world.counter("preemptions") == 0
    world.pool.free(taken)
    world.core.scheduler.abort("nobody")  # blocks came free: as any command says
    assert tokens_of(world.run(), "r") == [1020, 1021]
