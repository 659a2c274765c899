"""Tests that blocks behind the window of all layers are freed, and that no freed block is read."""

from __future__ import annotations

from tandem_engine.messages import StartDecode
from tests.tandem_engine.scheduling.harness import ROOT, EngineHarness, kv_of, slab, tokens_of

PROMPT = list(range(24))  # six blocks of four


def used_blocks(harness: EngineHarness) -> list[int]:
    """Step to the end; return how many blocks were used after each step."""
    used = []
    while harness.core.has_work():
        used.append(harness.step().stats.num_used_blocks)
    return used


def test_blocks_behind_the_window_come_back_while_the_answer_grows() -> None:
    harness = EngineHarness(window=7)
    harness.add("a", PROMPT[:8], max_tokens=12)
    # The next token sees six before it: the one at 9 from 3 on, the one at 10 from 4 on.
    assert used_blocks(harness) == [2, 3, 2, 2, 2, 3, 2, 2, 2, 3, 2, 0]
    harness.assert_nothing_is_left()


def test_a_prompt_computed_in_chunks_gives_blocks_back_as_it_goes() -> None:
    harness = EngineHarness(window=5, max_num_batched_tokens=8)
    harness.add("a", PROMPT, max_tokens=2)
    # All six are given with the start; a token at 8 sees from 4 on, one at 16 from 12 on, one at 24 from 20 on.
    assert used_blocks(harness) == [5, 3, 1, 0]
    harness.assert_nothing_is_left()


def test_without_a_window_nothing_comes_back_early() -> None:
    harness = EngineHarness(max_num_batched_tokens=8)
    harness.add("a", PROMPT, max_tokens=2)
    assert used_blocks(harness) == [6, 6, 6, 0]


def test_blocks_that_came_back_are_found_and_only_the_windows_are_needed() -> None:
    harness = EngineHarness(num_blocks=8, window=6)
    harness.add("a", PROMPT, max_tokens=1, root=ROOT)
    harness.run()
    assert harness.pool.num_cached == 6
    # 1. The whole prompt is known but for its last token's block: five blocks, of which two are read.
    harness.add("b", PROMPT, max_tokens=1, root=ROOT)
    done = harness.step()
    assert harness.last_runs() == [("b", 20, 4)]
    assert (done.outputs[0].num_cached_tokens, done.outputs[0].num_computed_tokens) == (20, 4)
    # 2. Once the first blocks are evicted, the last ones are still found.
    harness.add("evicts", [99] * 16, max_tokens=1)
    harness.run()
    assert harness.pool.num_cached < 6
    harness.add("c", PROMPT, max_tokens=1, root=ROOT)
    harness.run()
    assert harness.last_runs() == [("c", 20, 4)]
    harness.assert_nothing_is_left()


def test_a_gap_in_the_window_is_not_found() -> None:
    harness = EngineHarness(num_blocks=16, window=9)
    harness.add("a", PROMPT[:13], max_tokens=1, root=ROOT)
    harness.run()
    harness.add("b", [*PROMPT[:12], 77, 78, 79, 80, *PROMPT[16:]], max_tokens=1, root=ROOT)
    harness.run()
    assert harness.last_runs() == [("b", 12, 12)]
    harness.assert_nothing_is_left()


def test_a_prefill_keeps_and_hands_over_its_whole_prompt() -> None:
    harness = EngineHarness(window=5, max_num_batched_tokens=8)
    harness.add("p", PROMPT, mode="prefill", root=ROOT)
    sealed = []
    while harness.core.has_work():
        done = harness.step()
        sealed += [slot for each in done.sealed for slot in each.slots]
    assert len(set(sealed)) == 6
    assert done.stats.num_held_blocks == 6
    harness.core.scheduler.release_held("p")
    harness.assert_nothing_is_left()


def test_a_decode_request_gives_back_what_it_imported_before_its_window() -> None:
    harness = EngineHarness(window=5)
    harness.runner.remote = {40 + i: kv_of(PROMPT)[4 * i : 4 * i + 4] for i in range(6)}
    harness.add("d", PROMPT, mode="decode", max_tokens=4, root=ROOT)
    harness.core.handle(slab("d", 0, range(40, 46)))
    assert harness.pool.num_used == 7
    harness.core.handle(StartDecode("d", [1024]))
    assert harness.pool.num_used == 2  # of the prompt the last, and one for the answer
    assert tokens_of(harness.run(), "d") == [1025, 1026, 1027]
    assert harness.counter("reprefill_tokens") == 0
    harness.assert_nothing_is_left()


def test_a_decode_request_needs_only_what_lies_behind_the_blocks_found_here() -> None:
    harness = EngineHarness(num_blocks=10, window=5)
    harness.add("a", PROMPT, max_tokens=1, root=ROOT)
    harness.run()
    harness.add("evicts", [99] * 28, max_tokens=1)  # the first three blocks of the prompt are forgotten
    harness.run()
    (reserved,) = harness.add("d", PROMPT, mode="decode", max_tokens=4, root=ROOT)
    assert reserved.num_cached_blocks == 6  # type: ignore[union-attr]
    harness.core.handle(StartDecode("d", [1024]))
    assert tokens_of(harness.run(), "d") == [1025, 1026, 1027]
    assert harness.counter("reprefill_tokens") == 0
    harness.assert_nothing_is_left()


def test_a_preempted_request_finds_its_window_again_and_answers_the_same() -> None:
    harness = EngineHarness(num_blocks=8, window=6, context_length=64)
    for name in ("a", "b", "c"):
        harness.add(name, [ord(name), 2, 3, 4], max_tokens=26, root=ROOT)
    outputs = harness.run()
    for name in ("a", "b", "c"):
        assert tokens_of(outputs, name) == list(range(1004, 1030))
    assert harness.counter("preemptions") > 0
    harness.assert_nothing_is_left()


def test_long_answers_run_side_by_side_where_their_windows_fit() -> None:
    harness = EngineHarness(num_blocks=12, window=6, context_length=64)
    for name in ("a", "b", "c", "d"):
        harness.add(name, [1, 2, 3, 4], max_tokens=40)  # eleven blocks each, three at a time
    outputs = harness.run()
    assert harness.counter("preemptions") == 0
    assert len(harness.runner.steps) == 40
    assert all(len(tokens_of(outputs, name)) == 40 for name in ("a", "b", "c", "d"))
    harness.assert_nothing_is_left()
