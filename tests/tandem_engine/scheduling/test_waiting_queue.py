"""Tests the order of the waiting requests."""

from __future__ import annotations

from tests.tandem_engine.scheduling.harness import EngineHarness


def order_of_service(harness: EngineHarness) -> list[str]:
    """Run one request at a time to its end; return the ids in order."""
    harness.run()
    harness.assert_nothing_is_left()
    return [run[0] for step in harness.runner.steps for run in step]


def test_a_higher_priority_runs_first_and_equals_run_as_they_came() -> None:
    harness = EngineHarness(max_num_seqs=1)
    for name, priority in [("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5)]:
        harness.add(name, [1], max_tokens=1, priority=priority)
    assert order_of_service(harness) == ["b", "e", "a", "c", "d"]


def test_a_client_with_many_requests_does_not_stand_before_one_with_a_single_request() -> None:
    harness = EngineHarness(max_num_seqs=1)
    for name in ("a1", "a2", "a3", "b1", "a4", "b2", "c1"):
        harness.add(name, [1], max_tokens=1, fairness_key=name[0])
    assert order_of_service(harness) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_priority_comes_before_fairness() -> None:
    harness = EngineHarness(max_num_seqs=1)
    harness.add("a1", [1], max_tokens=1, fairness_key="a", priority=1)
    harness.add("a2", [1], max_tokens=1, fairness_key="a", priority=1)
    harness.add("b1", [1], max_tokens=1, fairness_key="b")
    assert order_of_service(harness) == ["a1", "a2", "b1"]


def test_a_request_that_leaves_does_not_cost_its_key_a_turn() -> None:
    harness = EngineHarness(max_num_seqs=1)
    for name in ("a1", "a2", "b1"):
        harness.add(name, [1], max_tokens=1, fairness_key=name[0])
    harness.core.scheduler.abort("a1")
    assert order_of_service(harness) == ["a2", "b1"]


def test_a_large_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    harness = EngineHarness(num_blocks=4, max_num_batched_tokens=32)
    harness.add("running", [1, 2, 3, 4, 5], max_tokens=3)
    harness.step()
    harness.add("large", list(range(12)), max_tokens=1)
    harness.add("small", [1], max_tokens=1)
    harness.step()
    assert harness.last_runs() == [("running", 5, 1)]
    assert order_of_service(harness)[2:] == ["running", "large", "small"]
