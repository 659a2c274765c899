"""Tests that the core schedules, executes and updates, and answers each command."""

from __future__ import annotations

import pytest

from tandem_engine.core import RequestsFailed
from tandem_engine.messages import (
    AbortRequest,
    MapRegion,
    Recompute,
    ReleaseHeld,
    RequestFailed,
    Shutdown,
    SlabImported,
    StepDone,
    UnmapRegion,
)
from tests.tandem_engine.scheduling.harness import World, slab, tokens_of


def test_aborts_and_releases_answer_with_the_new_figures() -> None:
    world = World()
    world.add("p", [1, 2, 3], mode="prefill")
    world.add("a", [1, 2, 3], max_tokens=9)
    world.step()
    (after_abort,) = world.core.handle(AbortRequest("a"))
    assert isinstance(after_abort, StepDone)
    assert (after_abort.step, after_abort.outputs, after_abort.stats.num_running) == (1, [], 0)
    (after_release,) = world.core.handle(ReleaseHeld("p"))
    assert isinstance(after_release, StepDone)
    assert (after_release.stats.num_held_blocks, after_release.stats.num_free_blocks) == (0, 16)
    world.assert_nothing_is_left()


def test_regions_are_the_runners_affair() -> None:
    world = World()
    assert world.core.handle(MapRegion("r", 4096, 4, 0), fd=7) == []
    assert world.runner.regions == {"r": 7}
    assert world.core.handle(UnmapRegion("r")) == []
    assert world.runner.regions == {}
    assert world.core.handle(Shutdown()) == []


def test_a_region_that_cannot_be_mapped_fails_its_slabs_and_nothing_else() -> None:
    world = World()
    world.runner.unmappable_regions = {"prefill"}
    world.runner.stale_slots = {20}
    assert world.core.handle(MapRegion("prefill", 4096, 4, 0), fd=7) == []
    world.add("d", [1, 2, 3], mode="decode", max_tokens=2)
    (event,) = world.core.handle(slab("d", 0, [20]))
    assert isinstance(event, SlabImported)
    assert event.error
    world.core.handle(Recompute("d"))
    assert tokens_of(world.run(), "d") == [1003, 1004]
    world.assert_nothing_is_left()


def test_generations_are_written_where_the_runner_keeps_them() -> None:
    world = World(num_blocks=2)
    world.add("a", [1, 2, 3, 4, 5], max_tokens=1)
    world.run()
    assert list(world.runner.generations) == [1, 1]
    world.assert_nothing_is_left()


def test_a_request_that_breaks_a_step_fails_alone() -> None:
    world = World()
    world.add("good", [1, 2, 3], max_tokens=2)
    world.add("bad", [1, 2, 3], max_tokens=2)
    world.runner.breaks_with = RequestsFailed(["bad"], "logits are not numbers")
    done = world.step()
    assert done.outputs == []
    assert world.core.take_failures() == [RequestFailed("bad", "logits are not numbers")]
    assert world.core.take_failures() == []
    assert tokens_of(world.run(), "good") == [1003, 1004]
    world.assert_nothing_is_left()


def test_any_other_error_of_the_runner_ends_the_engine() -> None:
    world = World()
    world.add("a", [1, 2, 3])
    world.runner.breaks_with = RuntimeError("CUDA error")
    with pytest.raises(RuntimeError, match="CUDA error"):
        world.core.step()
    world.runner.breaks_with = RequestsFailed(["not in this step"], "who?")
    with pytest.raises(RequestsFailed):
        world.core.step()


def test_steps_are_counted_and_timed() -> None:
    world = World()
    world.add("a", [1, 2, 3], max_tokens=3)
    world.run()
    assert world.counter("steps") == 3
    assert world.counter("tokens_generated") == 3
    assert world.counter("step_seconds") > 0
    world.assert_nothing_is_left()
