"""Tests that a request whose first token cannot be sampled yet waits, and that the others continue."""

from __future__ import annotations

from tandem_engine.messages import StartDecode
from tests.tandem_engine.scheduling.harness import EngineHarness, tokens_of


def test_all_but_its_last_token_runs_beside_others_which_go_on() -> None:
    harness = EngineHarness()
    harness.add("a", [1, 2, 3], max_tokens=6)
    harness.step()
    # 1. Its prompt is computed, except the token that it would sample from.
    harness.runner.unready = {"b"}
    harness.add("b", [1, 2, 3, 4, 5], max_tokens=2)
    harness.step()
    assert harness.last_runs() == [("a", 3, 1), ("b", 0, 4)]
    # 2. Then it waits and keeps its blocks.
    harness.step()
    assert harness.last_runs() == [("a", 4, 1)]
    assert harness.core.scheduler.stats().num_running == 2
    # 3. Once it is ready it samples.
    harness.runner.unready = set()
    done = harness.step()
    assert harness.last_runs() == [("a", 5, 1), ("b", 4, 1)]
    assert tokens_of(done.outputs, "b") == [1005]
    harness.run()
    harness.assert_nothing_is_left()


def test_where_nobody_else_runs_it_is_waited_for() -> None:
    harness = EngineHarness()
    harness.runner.unready = {"a", "b"}
    harness.add("a", [1, 2, 3], max_tokens=2)
    harness.add("b", [4, 5, 6], max_tokens=2)
    harness.step()
    assert harness.last_runs() == [("a", 0, 3), ("b", 0, 2)]
    harness.run()
    harness.assert_nothing_is_left()


def test_a_prompt_of_one_token_waits_and_whoever_came_later_does_not() -> None:
    harness = EngineHarness()
    harness.runner.unready = {"a"}
    harness.add("a", [1], max_tokens=2)
    harness.add("b", [1, 2, 3], max_tokens=3)
    for runs in ([("b", 0, 3)], [("b", 3, 1)], [("b", 4, 1)], [("a", 0, 1)]):
        harness.step()
        assert harness.last_runs() == runs
    harness.run()
    harness.assert_nothing_is_left()


def test_a_prompt_in_chunks_waits_at_its_end_alone() -> None:
    harness = EngineHarness(max_num_batched_tokens=6)
    harness.add("a", [1, 2, 3], max_tokens=5)
    harness.step()
    harness.runner.unready = {"b"}
    harness.add("b", list(range(8)), max_tokens=1)
    for runs in ([("a", 3, 1), ("b", 0, 5)], [("a", 4, 1), ("b", 5, 2)], [("a", 5, 1)]):
        harness.step()
        assert harness.last_runs() == runs
    harness.run()
    harness.assert_nothing_is_left()


def test_what_came_from_elsewhere_waits_too() -> None:
    harness = EngineHarness()
    harness.add("a", [1, 2, 3], max_tokens=4)
    harness.step()
    harness.runner.unready = {"b"}
    harness.add("b", [1, 2], max_tokens=3, mode="decode")
    harness.core.handle(StartDecode("b", [1002]))
    harness.step()
    assert harness.last_runs() == [("a", 3, 1), ("b", 0, 2)]
    harness.step()
    assert harness.last_runs() == [("a", 4, 1)]
    harness.runner.unready = set()
    assert tokens_of(harness.run(), "b") == [1003, 1004]
    harness.assert_nothing_is_left()


def test_one_that_waits_can_lose_its_blocks() -> None:
    harness = EngineHarness(num_blocks=4)
    harness.add("a", [1, 2, 3, 4, 5, 6], max_tokens=8)
    harness.step()
    harness.runner.unready = {"b"}
    harness.add("b", [1, 2, 3], max_tokens=2)
    outputs = []
    while not harness.core.scheduler.stats().counters.get("preemptions"):
        outputs += harness.step().outputs
        assert tokens_of(outputs, "b") == []
    outputs += harness.run()
    assert (len(tokens_of(outputs, "a")), tokens_of(outputs, "b")) == (8 - 1, [1003, 1004])
    harness.assert_nothing_is_left()
