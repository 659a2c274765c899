"""Tests that a request whose first token cannot be sampled yet waits, and that the others continue."""

from __future__ import annotations

from tandem_engine.messages import StartDecode
from tests.tandem_engine.scheduling.harness import World, tokens_of


def test_all_but_its_last_token_runs_beside_others_which_go_on() -> None:
    world = World()
    world.add("a", [1, 2, 3], max_tokens=6)
    world.step()
    # 1. Its prompt is computed, but for the token that it would draw with.
    world.runner.unready = {"b"}
    world.add("b", [1, 2, 3, 4, 5], max_tokens=2)
    world.step()
    assert world.last_runs() == [("a", 3, 1), ("b", 0, 4)]
    # 2. Then it waits, and its blocks with it.
    world.step()
    assert world.last_runs() == [("a", 4, 1)]
    assert world.core.scheduler.stats().num_running == 2
    # 3. Once it is ready it draws.
    world.runner.unready = set()
    done = world.step()
    assert world.last_runs() == [("a", 5, 1), ("b", 4, 1)]
    assert tokens_of(done.outputs, "b") == [1005]
    world.run()
    world.assert_nothing_is_left()


def test_where_nobody_else_runs_it_is_waited_for() -> None:
    world = World()
    world.runner.unready = {"a", "b"}
    world.add("a", [1, 2, 3], max_tokens=2)
    world.add("b", [4, 5, 6], max_tokens=2)
    world.step()
    assert world.last_runs() == [("a", 0, 3), ("b", 0, 2)]
    world.run()
    world.assert_nothing_is_left()


def test_a_prompt_of_one_token_waits_and_whoever_came_later_does_not() -> None:
    world = World()
    world.runner.unready = {"a"}
    world.add("a", [1], max_tokens=2)
    world.add("b", [1, 2, 3], max_tokens=3)
    for runs in ([("b", 0, 3)], [("b", 3, 1)], [("b", 4, 1)], [("a", 0, 1)]):
        world.step()
        assert world.last_runs() == runs
    world.run()
    world.assert_nothing_is_left()


def test_a_prompt_in_chunks_waits_at_its_end_alone() -> None:
    world = World(max_num_batched_tokens=6)
    world.add("a", [1, 2, 3], max_tokens=5)
    world.step()
    world.runner.unready = {"b"}
    world.add("b", list(range(8)), max_tokens=1)
    for runs in ([("a", 3, 1), ("b", 0, 5)], [("a", 4, 1), ("b", 5, 2)], [("a", 5, 1)]):
        world.step()
        assert world.last_runs() == runs
    world.run()
    world.assert_nothing_is_left()


def test_what_came_from_elsewhere_waits_too() -> None:
    world = World()
    world.add("a", [1, 2, 3], max_tokens=4)
    world.step()
    world.runner.unready = {"b"}
    world.add("b", [1, 2], max_tokens=3, mode="decode")
    world.core.handle(StartDecode("b", [1002]))
    world.step()
    assert world.last_runs() == [("a", 3, 1), ("b", 0, 2)]
    world.step()
    assert world.last_runs() == [("a", 4, 1)]
    world.runner.unready = set()
    assert tokens_of(world.run(), "b") == [1003, 1004]
    world.assert_nothing_is_left()


def test_one_that_waits_can_lose_its_blocks() -> None:
    world = World(num_blocks=4)
    world.add("a", [1, 2, 3, 4, 5, 6], max_tokens=8)
    world.step()
    world.runner.unready = {"b"}
    world.add("b", [1, 2, 3], max_tokens=2)
    outputs = []
    while not world.core.scheduler.stats().counters.get("preemptions"):
        outputs += world.step().outputs
        assert tokens_of(outputs, "b") == []
    outputs += world.run()
    assert (len(tokens_of(outputs, "a")), tokens_of(outputs, "b")) == (8 - 1, [1003, 1004])
    world.assert_nothing_is_left()
