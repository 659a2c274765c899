"""Tests what happens when the blocks run out."""

from __future__ import annotations

from tests.tandem_engine.scheduling.harness import ROOT, EngineHarness, tokens_of


def test_the_latest_arrival_is_preempted_waits_and_answers_the_same() -> None:
    harness = EngineHarness(num_blocks=4)
    # 1. Two requests of one block each, with room for one more block each.
    harness.add("a", [1, 2, 3, 4], max_tokens=6)
    harness.add("b", [1, 2, 3, 4], max_tokens=6)
    outputs = harness.step().outputs
    assert harness.last_runs() == [("a", 0, 4), ("b", 0, 4)]
    for _ in range(4):
        outputs += harness.step().outputs
    assert harness.last_runs() == [("a", 7, 1), ("b", 7, 1)]
    # 2. Both need a third block, none is left: b gives up its two.
    done = harness.step()
    outputs += done.outputs
    assert harness.last_runs() == [("a", 8, 1)]
    assert (done.stats.num_running, done.stats.num_waiting, done.stats.num_used_blocks) == (0, 1, 0)
    # 3. b computes prompt and answer again, and goes on where it was.
    outputs += harness.run()
    assert harness.runner.steps[-1] == [("b", 0, 9)]
    assert tokens_of(outputs, "a") == tokens_of(outputs, "b") == [1004, 1005, 1006, 1007, 1008, 1009]
    # 4. Its prompt is accounted once.
    assert (outputs[-1].num_computed_tokens, outputs[-1].num_cached_tokens) == (4, 0)
    assert (outputs[-1].num_preemptions, harness.counter("preemptions")) == (1, 1)
    harness.assert_nothing_is_left()


def test_the_lowest_priority_is_preempted_even_if_it_came_first() -> None:
    harness = EngineHarness(num_blocks=4)
    harness.add("low", [1, 2, 3, 4], max_tokens=6, priority=0)
    harness.add("high", [1, 2, 3, 4], max_tokens=6, priority=1)
    outputs = harness.run()
    assert {o.request_id: o.num_preemptions for o in outputs if o.is_last} == {"high": 0, "low": 1}
    harness.assert_nothing_is_left()


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    harness = EngineHarness(num_blocks=5)
    harness.add("a", [1, 2, 3, 4], max_tokens=8, root=ROOT)
    harness.add("b", [5, 6, 7, 8], max_tokens=8, root=ROOT)
    outputs = harness.run()
    preempted = next(o for o in outputs if o.request_id == "b" and o.is_last)
    assert preempted.num_preemptions == 1
    # Its prompt was computed here before it was found here, and is accounted as computed, once.
    assert (preempted.num_computed_tokens, preempted.num_cached_tokens) == (4, 0)
    assert ("b", 8, 1) in [run for step in harness.runner.steps for run in step]
    assert tokens_of(outputs, "b") == list(range(1004, 1012))
    harness.assert_nothing_is_left()


def test_a_preempted_request_runs_before_those_that_have_not_run_yet() -> None:
    harness = EngineHarness(num_blocks=4, max_num_seqs=2)
    harness.add("a", [1, 2, 3, 4], max_tokens=6)
    harness.add("b", [1, 2, 3, 4], max_tokens=6)
    harness.add("c", [1, 2, 3, 4], max_tokens=1)
    for _ in range(6):
        harness.step()
    assert harness.last_runs() == [("a", 8, 1)]
    harness.run()
    assert harness.runner.steps[-2:] == [[("b", 0, 9)], [("c", 0, 4)]]
    harness.assert_nothing_is_left()


def test_held_blocks_are_never_taken_and_the_engine_does_not_spin_while_it_waits_for_them() -> None:
    harness = EngineHarness(num_blocks=4)
    harness.add("held", [1, 2, 3, 4, 5, 6, 7, 8], mode="prefill")
    harness.run()
    harness.add("a", [1, 2, 3, 4], max_tokens=6)
    outputs = harness.run()
    assert tokens_of(outputs, "a") == [1004, 1005, 1006, 1007, 1008]
    stats = harness.core.scheduler.stats()
    assert (stats.num_waiting, stats.num_held_blocks, stats.num_used_blocks) == (1, 2, 2)
    harness.core.scheduler.release_held("held")
    assert tokens_of(harness.run(), "a") == [1009]
    harness.assert_nothing_is_left()


def test_a_prefill_is_never_preempted() -> None:
    harness = EngineHarness(num_blocks=4, max_num_batched_tokens=5)
    harness.add("a", [1, 2, 3], max_tokens=4, priority=1)
    harness.step()
    harness.add("prefill", list(range(8)), mode="prefill")
    outputs = harness.run()
    assert {o.request_id: o.num_preemptions for o in outputs if o.is_last} == {"a": 0, "prefill": 0}
    harness.core.scheduler.release_held("prefill")
    harness.assert_nothing_is_left()
