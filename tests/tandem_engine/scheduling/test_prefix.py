"""Tests that a prompt's prefix is loaded, the rest is computed, and filled blocks are reported."""

from __future__ import annotations

from tandem_engine.messages import FilledBlocks
from tandem_engine.scheduling.block_hash import hash_blocks
from tests.tandem_engine.scheduling.harness import ROOT, World, kv_of, tokens_of

PROMPT = list(range(14))  # three full blocks of four tokens, and two tokens more


def _hashes(tokens: list[int]) -> list[str]:
    return [block_hash.hex() for block_hash in hash_blocks(ROOT, tokens, 4)]


def _world_with_remote(tokens: list[int], first_slot: int = 40) -> World:
    """A world beside which every block of `tokens` lies in a remote slot, from `first_slot` on."""
    world = World()
    kv = kv_of(tokens)
    world.runner.remote = {first_slot + block: kv[4 * block : 4 * block + 4] for block in range(len(tokens) // 4)}
    return world


def test_a_prefix_that_lies_ready_is_loaded_and_the_rest_computed() -> None:
    world = _world_with_remote(PROMPT)
    world.add("a", PROMPT, root=ROOT, prefix={0: 40, 1: 41, 2: 42}, max_tokens=2)
    # 1. As it leaves the queue its blocks are copied, and the same step computes what is behind them.
    done = world.step()
    assert world.runner.imported == [(40, 0), (41, 1), (42, 2)]
    assert world.last_runs() == [("a", 12, 2)]
    assert done.admitted == ["a"]
    # 2. The ledger says what was not computed.
    outputs = [*done.outputs, *world.run()]
    assert tokens_of(outputs, "a") == [1014, 1015]
    last = outputs[-1]
    assert (last.num_computed_tokens, last.num_cached_tokens, last.num_loaded_tokens) == (2, 12, 12)
    assert world.counter("prompt_tokens_loaded") == 12
    # 3. Loaded blocks are found by the next request without loading.
    world.add("b", PROMPT, root=ROOT, max_tokens=1)
    (output,) = world.run()
    assert (output.num_computed_tokens, output.num_cached_tokens, output.num_loaded_tokens) == (2, 12, 0)
    world.assert_nothing_is_left()


def test_what_the_own_pool_has_is_not_loaded() -> None:
    world = _world_with_remote(PROMPT)
    world.add("a", PROMPT[:9], root=ROOT, max_tokens=1)
    world.run()
    world.add("b", PROMPT, root=ROOT, prefix={0: 40, 1: 41, 2: 42}, max_tokens=1)
    (output,) = world.run()
    assert [slot for slot, _ in world.runner.imported] == [42]
    assert (output.num_cached_tokens, output.num_loaded_tokens, output.num_computed_tokens) == (12, 4, 2)
    world.assert_nothing_is_left()


def test_a_prefix_with_a_gap_is_loaded_up_to_the_gap() -> None:
    world = _world_with_remote(PROMPT)
    world.add("a", PROMPT, root=ROOT, prefix={0: 40, 2: 42}, max_tokens=1)
    (output,) = world.run()
    assert [slot for slot, _ in world.runner.imported] == [40]
    assert (output.num_cached_tokens, output.num_computed_tokens) == (4, 10)
    world.assert_nothing_is_left()


def test_one_token_is_always_computed() -> None:
    world = _world_with_remote(PROMPT[:8])
    world.add("a", PROMPT[:8], root=ROOT, prefix={0: 40, 1: 41}, max_tokens=1)
    (output,) = world.run()
    assert (output.num_cached_tokens, output.num_computed_tokens) == (4, 4)
    world.assert_nothing_is_left()


def test_a_prefix_that_is_gone_is_computed() -> None:
    world = _world_with_remote(PROMPT)
    world.runner.stale_slots = {41}
    world.add("a", PROMPT, root=ROOT, prefix={0: 40, 1: 41, 2: 42}, max_tokens=1)
    (output,) = world.run()
    assert output.token_ids == [1014]
    assert (output.num_cached_tokens, output.num_loaded_tokens, output.num_computed_tokens) == (0, 0, 14)
    world.assert_nothing_is_left()


def test_a_prefill_seals_what_it_loaded_with_what_it_computed() -> None:
    world = _world_with_remote(PROMPT)
    world.add("p", PROMPT, mode="prefill", root=ROOT, prefix={0: 40, 1: 41, 2: 42})
    (sealed,) = world.step().sealed
    assert (sealed.first_block, len(sealed.slots), sealed.is_last) == (0, 4, True)
    world.core.scheduler.release_held("p")
    world.assert_nothing_is_left()


def test_computed_blocks_are_told_once_with_their_hashes_and_answers_too() -> None:
    world = World()
    world.add("a", PROMPT, root=ROOT, max_tokens=4)
    answer = [1014, 1015, 1016]
    # 1. The prompt's full blocks, with the step that filled them.
    assert world.step().filled == [FilledBlocks("a", "", _hashes(PROMPT), [0, 1, 2], [1, 1, 1])]
    # 2. The block that the answer fills, once its last token is computed.
    filled = [block for _ in range(3) for block in world.step().filled]
    assert filled == [FilledBlocks("a", _hashes(PROMPT)[2], _hashes([*PROMPT, *answer])[3:], [3], [1])]
    # 3. What was found or loaded is not told again.
    world.add("b", PROMPT, root=ROOT, max_tokens=1)
    assert world.step().filled == []
    world.assert_nothing_is_left()


def test_without_a_hash_root_nothing_is_loaded_or_told() -> None:
    world = _world_with_remote(PROMPT)
    world.add("a", PROMPT, prefix={0: 40}, max_tokens=1)
    done = world.step()
    assert world.runner.imported == []
    assert done.filled == []
    world.assert_nothing_is_left()
