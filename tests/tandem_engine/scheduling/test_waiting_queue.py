"""Tests the order of the waiting requests."""

from __future__ import annotations

from tests.tandem_engine.scheduling.harness import World


def order_of_service(world: World) -> list[str]:
    """Run one request at a time to its end; return who was served, in order."""
    world.run()
    world.assert_nothing_is_left()
    return [run[0] for step in world.runner.steps for run in step]


def test_a_higher_priority_runs_first_and_equals_run_as_they_came() -> None:
    world = World(max_num_seqs=1)
    for name, priority in [("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5)]:
        world.add(name, [1], max_tokens=1, priority=priority)
    assert order_of_service(world) == ["b", "e", "a", "c", "d"]


def test_a_client_with_many_requests_does_not_stand_before_one_with_a_single_request() -> None:
    world = World(max_num_seqs=1)
    for name in ("a1", "a2", "a3", "b1", "a4", "b2", "c1"):
        world.add(name, [1], max_tokens=1, fairness_key=name[0])
    assert order_of_service(world) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_priority_comes_before_fairness() -> None:
    world = World(max_num_seqs=1)
    world.add("a1", [1], max_tokens=1, fairness_key="a", priority=1)
    world.add("a2", [1], max_tokens=1, fairness_key="a", priority=1)
    world.add("b1", [1], max_tokens=1, fairness_key="b")
    assert order_of_service(world) == ["a1", "a2", "b1"]


def test_a_request_that_leaves_does_not_cost_its_key_a_turn() -> None:
    world = World(max_num_seqs=1)
    for name in ("a1", "a2", "b1"):
        world.add(name, [1], max_tokens=1, fairness_key=name[0])
    world.core.scheduler.abort("a1")
    assert order_of_service(world) == ["a2", "b1"]


def test_a_large_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    world = World(num_blocks=4, max_num_batched_tokens=32)
    world.add("running", [1, 2, 3, 4, 5], max_tokens=3)
    world.step()
    world.add("large", list(range(12)), max_tokens=1)
    world.add("small", [1], max_tokens=1)
    world.step()
    assert world.last_runs() == [("running", 5, 1)]
    assert order_of_service(world)[2:] == ["running", "large", "small"]
