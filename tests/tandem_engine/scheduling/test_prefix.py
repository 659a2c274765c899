"""Tests that a prompt's prefix is loaded, the rest is computed, and filled blocks are reported."""

from __future__ import annotations

from tandem_engine.messages import AbortRequest, FilledBlocks, StepDone
from tandem_engine.scheduling.block_hash import hash_blocks
from tests.tandem_engine.scheduling.harness import ROOT, EngineHarness, kv_of, tokens_of

PROMPT = list(range(14))  # three full blocks of four tokens, and two tokens more


def _hashes(tokens: list[int]) -> list[str]:
    return [block_hash.hex() for block_hash in hash_blocks(ROOT, tokens, 4)]


def _harness_with_remote(tokens: list[int], first_slot: int = 40) -> EngineHarness:
    """Return a harness with every block of `tokens` in a remote slot, from `first_slot` on."""
    harness = EngineHarness()
    kv = kv_of(tokens)
    harness.runner.remote = {first_slot + block: kv[4 * block : 4 * block + 4] for block in range(len(tokens) // 4)}
    return harness


def test_a_prefix_that_lies_ready_is_loaded_and_the_rest_computed() -> None:
    harness = _harness_with_remote(PROMPT)
    harness.add("a", PROMPT, root=ROOT, prefix={0: 40, 1: 41, 2: 42}, max_tokens=2)
    # 1. Its blocks are copied when it leaves the queue; the same step computes the rest.
    done = harness.step()
    assert harness.runner.imported == [(40, 0), (41, 1), (42, 2)]
    assert harness.last_runs() == [("a", 12, 2)]
    assert done.admitted == ["a"]
    # 2. The ledger counts what was not computed.
    outputs = [*done.outputs, *harness.run()]
    assert tokens_of(outputs, "a") == [1014, 1015]
    last = outputs[-1]
    assert (last.num_computed_tokens, last.num_cached_tokens, last.num_loaded_tokens) == (2, 12, 12)
    assert harness.counter("prompt_tokens_loaded") == 12
    # 3. Loaded blocks are found by the next request without loading.
    harness.add("b", PROMPT, root=ROOT, max_tokens=1)
    (output,) = harness.run()
    assert (output.num_computed_tokens, output.num_cached_tokens, output.num_loaded_tokens) == (2, 12, 0)
    harness.assert_nothing_is_left()


def test_what_the_own_pool_has_is_not_loaded() -> None:
    harness = _harness_with_remote(PROMPT)
    harness.add("a", PROMPT[:9], root=ROOT, max_tokens=1)
    harness.run()
    harness.add("b", PROMPT, root=ROOT, prefix={0: 40, 1: 41, 2: 42}, max_tokens=1)
    (output,) = harness.run()
    assert [slot for slot, _ in harness.runner.imported] == [42]
    assert (output.num_cached_tokens, output.num_loaded_tokens, output.num_computed_tokens) == (12, 4, 2)
    harness.assert_nothing_is_left()


def test_a_prefix_with_a_gap_is_loaded_up_to_the_gap() -> None:
    harness = _harness_with_remote(PROMPT)
    harness.add("a", PROMPT, root=ROOT, prefix={0: 40, 2: 42}, max_tokens=1)
    (output,) = harness.run()
    assert [slot for slot, _ in harness.runner.imported] == [40]
    assert (output.num_cached_tokens, output.num_computed_tokens) == (4, 10)
    harness.assert_nothing_is_left()


def test_one_token_is_always_computed() -> None:
    harness = _harness_with_remote(PROMPT[:8])
    harness.add("a", PROMPT[:8], root=ROOT, prefix={0: 40, 1: 41}, max_tokens=1)
    (output,) = harness.run()
    assert (output.num_cached_tokens, output.num_computed_tokens) == (4, 4)
    harness.assert_nothing_is_left()


def test_a_prefix_that_is_gone_is_computed() -> None:
    harness = _harness_with_remote(PROMPT)
    harness.runner.stale_slots = {41}
    harness.add("a", PROMPT, root=ROOT, prefix={0: 40, 1: 41, 2: 42}, max_tokens=1)
    (output,) = harness.run()
    assert output.token_ids == [1014]
    assert (output.num_cached_tokens, output.num_loaded_tokens, output.num_computed_tokens) == (0, 0, 14)
    harness.assert_nothing_is_left()


def test_a_prefill_seals_what_it_loaded_with_what_it_computed() -> None:
    harness = _harness_with_remote(PROMPT)
    harness.add("p", PROMPT, mode="prefill", root=ROOT, prefix={0: 40, 1: 41, 2: 42})
    (sealed,) = harness.step().sealed
    assert (sealed.first_block, len(sealed.slots), sealed.is_last) == (0, 4, True)
    harness.core.scheduler.release_held("p")
    harness.assert_nothing_is_left()


def test_computed_blocks_are_told_once_with_their_hashes_and_answers_too() -> None:
    harness = EngineHarness()
    harness.add("a", PROMPT, root=ROOT, max_tokens=4)
    answer = [1014, 1015, 1016]
    # 1. The prompt's full blocks, with the step that filled them.
    assert harness.step().filled == [FilledBlocks("a", "", _hashes(PROMPT), [0, 1, 2], [1, 1, 1])]
    # 2. The block that the answer fills, once its last token is computed.
    filled = [block for _ in range(3) for block in harness.step().filled]
    assert filled == [FilledBlocks("a", _hashes(PROMPT)[2], _hashes([*PROMPT, *answer])[3:], [3], [1], first_block=3)]
    # 3. Cached and loaded blocks are not reported again.
    harness.add("b", PROMPT, root=ROOT, max_tokens=1)
    assert harness.step().filled == []
    harness.assert_nothing_is_left()


def test_without_a_hash_root_nothing_is_loaded_or_told() -> None:
    harness = _harness_with_remote(PROMPT)
    harness.add("a", PROMPT, prefix={0: 40}, max_tokens=1)
    done = harness.step()
    assert harness.runner.imported == []
    assert done.filled == []
    harness.assert_nothing_is_left()


def test_steps_tell_which_sample_points_the_pool_has_and_no_longer_has() -> None:
    harness, prompt = EngineHarness(num_blocks=13), list(range(40))
    chain = [bytes.fromhex(each) for each in _hashes(prompt)]
    # 1. Blocks of four tokens: those that end at 16 and 32 tokens, and the last one.
    harness.add("a", prompt, root=ROOT, max_tokens=1)
    first, second, third = (harness.step().points for _ in range(3))  # a step has room for 32 tokens
    assert first is not None and second is not None and third is None
    assert (first.stored, first.evicted) == (chain[3][:8] + chain[7][:8], b"")
    assert (second.stored, second.evicted) == (chain[9][:8], b"")
    # 2. Another prompt needs some of the blocks: the end of the chain goes first.
    harness.add("b", list(range(1000, 1027)), root=ROOT, max_tokens=1)
    points = harness.step().points
    other = [bytes.fromhex(each) for each in _hashes(list(range(1000, 1027)))]
    assert points is not None
    assert (points.stored, points.evicted) == (other[3][:8] + other[5][:8], chain[9][:8] + chain[7][:8])
    harness.assert_nothing_is_left()


def test_steps_tell_where_a_prompt_and_its_answer_end() -> None:
    """The next turn of a session goes on after the answer, or after the prompt if its client changes the answer."""
    harness, prompt = EngineHarness(num_blocks=16), list(range(14))
    harness.add("a", prompt, root=ROOT, max_tokens=8)
    steps = [harness.step() for _ in range(8)]
    answer = [token for done in steps for output in done.outputs for token in output.token_ids]
    chain = [bytes.fromhex(each)[:8] for each in _hashes([*prompt, *answer[:-1]])]
    assert len(chain) == 5  # the last token has no KV
    told = [done.points for done in steps if done.points is not None]
    assert [each.evicted for each in told] == [b""] * len(told)
    # 1. Of 14 tokens the block that ends at 12; the one that ends at 16 is a sample point of the answer.
    assert b"".join(each.stored for each in told) == chain[3] + chain[2] + chain[4]
    # 2. What was told is not told again: neither of the same prompt, nor of one that goes on.
    harness.add("b", [*prompt, *answer[:-1]], root=ROOT, max_tokens=1)
    assert harness.step().points is None
    harness.assert_nothing_is_left()


def test_with_overlap_what_one_step_stores_and_the_next_evicts_is_told_in_this_order() -> None:
    """A request that is given up marks its ends as its step has ended, and the next one takes its blocks at once."""
    harness = EngineHarness(num_blocks=5, overlaps=True)
    harness.add("a", list(range(15)), root=ROOT, max_tokens=4)
    events = harness.turn()
    harness.add("b", list(range(100, 115)), root=ROOT, max_tokens=4)
    harness.core.handle(AbortRequest("a"))
    while harness.core.has_work():
        events += harness.turn()
    end = bytes.fromhex(_hashes(list(range(12)))[2])[:8]
    points = [event.points for event in events if isinstance(event, StepDone) and event.points is not None]
    told = [name for each in points for name in ("evicted", "stored") if end in getattr(each, name)]
    assert told == ["stored", "evicted"]
    harness.assert_nothing_is_left()


def test_a_request_that_leaves_nothing_tells_of_no_end() -> None:
    """Neither does it tell how much of its prompt was cached already."""
    for max_left_blocks, num_told in ((None, 2), (2, 1), (0, 0)):
        harness = EngineHarness()
        harness.add("a", list(range(14)), root=ROOT, max_tokens=1)
        harness.step()
        harness.add("b", [*range(9), *range(50, 56)], root=ROOT, max_tokens=3, max_left_blocks=max_left_blocks)
        told = b"".join(done.points.stored for done in (harness.step() for _ in range(3)) if done.points is not None)
        assert len(told) == 8 * num_told
        harness.assert_nothing_is_left()


def test_an_end_that_was_evicted_is_not_told() -> None:
    """Behind a window, blocks of a prompt are free while its answer goes on; another request takes them."""
    harness = EngineHarness(num_blocks=12, window=4)
    prompts = [list(range(first, first + 9)) for first in (0, 1000)]
    for prompt in prompts:
        harness.add(f"{prompt[0]}", prompt, root=ROOT, max_tokens=39)
    told, num_tokens = b"", 0
    while harness.core.has_work():
        done = harness.step()
        told += b"" if done.points is None else done.points.stored
        num_tokens += sum(len(output.token_ids) for output in done.outputs)
    assert num_tokens == 2 * 39
    ends = [bytes.fromhex(_hashes(prompt)[1])[:8] for prompt in prompts]
    assert told and not any(end in told for end in ends)
    harness.assert_nothing_is_left()
