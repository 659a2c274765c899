"""Tests that each step runs the right tokens, in the right order, within one budget."""

from __future__ import annotations

from tandem_engine.messages import Reserved
from tests.tandem_engine.scheduling.harness import ROOT, EngineHarness, tokens_of


def test_a_request_is_computed_sampled_and_freed() -> None:
    harness = EngineHarness()
    # 1. It waits, and owns nothing.
    assert harness.add("a", [1, 2, 3, 4, 5], max_tokens=3) == [Reserved("a", 0)]
    assert harness.core.scheduler.stats().num_waiting == 1
    # 2. Its prompt is one run; the token that follows stands at position 5.
    done = harness.step()
    assert harness.last_runs() == [("a", 0, 5)]
    assert [(o.token_ids, o.position, o.is_last) for o in done.outputs] == [([1005], 5, False)]
    assert (done.stats.num_running, done.stats.num_used_blocks, done.stats.num_tokens_in_flight) == (1, 2, 6)
    # 3. Then one token per step, each computing the one before.
    assert tokens_of(harness.step().outputs, "a") == [1006]
    assert harness.last_runs() == [("a", 5, 1)]
    # 4. The last output has the reason and the final counts; its token is never computed.
    last = harness.step().outputs[0]
    assert harness.last_runs() == [("a", 6, 1)]
    assert (last.token_ids, last.finish_reason, last.is_last) == ([1007], "length", True)
    assert (last.num_computed_tokens, last.num_cached_tokens, last.num_generated_tokens) == (5, 0, 3)
    assert 0 < last.times.added_ns <= last.times.scheduled_ns <= last.times.first_token_ns <= last.times.finished_ns
    # 5. Nothing is left.
    harness.assert_nothing_is_left()


def test_a_long_prompt_is_computed_in_chunks_beside_running_answers() -> None:
    harness = EngineHarness(max_num_batched_tokens=8)
    harness.add("short", [1, 2, 3], max_tokens=5)
    harness.step()
    harness.add("long", list(range(20)), max_tokens=1)
    harness.step()
    assert harness.last_runs() == [("short", 3, 1), ("long", 0, 7)]
    harness.step()
    assert harness.last_runs() == [("short", 4, 1), ("long", 7, 7)]
    done = harness.step()
    assert harness.last_runs() == [("short", 5, 1), ("long", 14, 6)]
    assert tokens_of(done.outputs, "long") == [1020]
    harness.run()
    harness.assert_nothing_is_left()


def test_one_budget_holds_answers_chunks_begun_and_new_prompts_in_that_order() -> None:
    harness = EngineHarness(max_num_batched_tokens=8)
    harness.add("begun", list(range(10)), max_tokens=2)
    harness.step()
    harness.add("new", [1, 2, 3], max_tokens=2)
    harness.add("next", [1, 2, 3, 4], max_tokens=2)
    harness.step()
    assert harness.last_runs() == [("begun", 8, 2), ("new", 0, 3), ("next", 0, 3)]
    harness.step()
    assert harness.last_runs() == [("begun", 10, 1), ("new", 3, 1), ("next", 3, 1)]
    harness.run()
    harness.assert_nothing_is_left()


def test_no_more_requests_run_than_there_are_seats() -> None:
    harness = EngineHarness(max_num_seqs=2)
    for name in "abc":
        harness.add(name, [1, 2], max_tokens=2)
    harness.step()
    assert harness.last_runs() == [("a", 0, 2), ("b", 0, 2)]
    harness.step()
    assert harness.last_runs() == [("a", 2, 1), ("b", 2, 1)]
    harness.step()
    assert harness.last_runs() == [("c", 0, 2)]
    harness.run()
    harness.assert_nothing_is_left()


def test_a_prompt_finds_the_full_blocks_that_another_left_and_computes_at_least_one_token() -> None:
    harness = EngineHarness()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    harness.add("first", prompt, max_tokens=1, root=ROOT)
    assert harness.run()[-1].num_computed_tokens == 8
    harness.add("same", prompt, max_tokens=1, root=ROOT)
    last = harness.run()[-1]
    assert harness.last_runs() == [("same", 4, 4)]
    assert (last.num_computed_tokens, last.num_cached_tokens) == (4, 4)
    harness.add("longer", [*prompt, 9], max_tokens=1, root=ROOT)
    last = harness.run()[-1]
    assert harness.last_runs() == [("longer", 8, 1)]
    assert (last.num_computed_tokens, last.num_cached_tokens) == (1, 8)
    assert (harness.counter("prompt_tokens_computed"), harness.counter("prompt_tokens_cached")) == (13, 12)
    harness.assert_nothing_is_left()


def test_answers_are_cached_too_so_that_the_next_turn_finds_them() -> None:
    harness = EngineHarness()
    harness.add("turn 1", [1, 2, 3], max_tokens=6, root=ROOT)
    answer = tokens_of(harness.run(), "turn 1")
    harness.add("turn 2", [1, 2, 3, *answer, 7], max_tokens=1, root=ROOT)
    assert harness.run()[-1].num_cached_tokens == 8
    harness.assert_nothing_is_left()


def test_nothing_is_found_across_roots_nor_by_requests_without_one() -> None:
    harness = EngineHarness()
    harness.add("mine", [1, 2, 3, 4, 5], max_tokens=1, root=ROOT)
    harness.run()
    other_root = type(ROOT)(bytes(16))
    harness.add("theirs", [1, 2, 3, 4, 5], max_tokens=1, root=other_root)
    harness.add("nobody's", [1, 2, 3, 4, 5], max_tokens=1)
    assert [output.num_cached_tokens for output in harness.run()] == [0, 0]
    assert harness.pool.num_cached == 2
    harness.assert_nothing_is_left()


def test_requests_that_run_together_share_the_blocks_they_found() -> None:
    harness = EngineHarness()
    harness.add("first", [1, 2, 3, 4, 5], max_tokens=1, root=ROOT)
    harness.run()
    harness.add("a", [1, 2, 3, 4, 6], max_tokens=2, root=ROOT)
    harness.add("b", [1, 2, 3, 4, 7], max_tokens=2, root=ROOT)
    assert harness.step().stats.num_used_blocks == 3
    harness.run()
    harness.assert_nothing_is_left()


def test_an_abort_gives_everything_back_wherever_the_request_is() -> None:
    harness = EngineHarness(max_num_seqs=1)
    harness.add("running", [1, 2, 3], max_tokens=9)
    harness.add("waiting", [1, 2, 3], max_tokens=9)
    harness.step()
    for request_id in ("waiting", "running", "unknown"):
        harness.core.scheduler.abort(request_id)
    harness.assert_nothing_is_left()
