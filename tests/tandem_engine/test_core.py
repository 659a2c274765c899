"""Tests that the core schedules, executes and updates, and answers each command."""

from __future__ import annotations

import pytest

from tandem_engine.core import RequestsFailed
from tandem_engine.messages import (
    AbortRequest,
    MapRegion,
    Recompute,
    ReleaseHeld,
    RequestAborted,
    RequestFailed,
    Shutdown,
    SlabImported,
    StepDone,
    UnmapRegion,
)
from tests.tandem_engine.scheduling.harness import EngineHarness, slab, tokens_of


def test_aborts_and_releases_answer_with_the_new_figures() -> None:
    harness = EngineHarness()
    harness.add("p", [1, 2, 3], mode="prefill")
    harness.add("a", [1, 2, 3], max_tokens=9)
    harness.step()
    aborted, after_abort = harness.core.handle(AbortRequest("a"))
    assert isinstance(aborted, RequestAborted)
    assert isinstance(after_abort, StepDone)
    assert (after_abort.step, after_abort.outputs, after_abort.stats.num_running) == (1, [], 0)
    (after_release,) = harness.core.handle(ReleaseHeld("p"))
    assert isinstance(after_release, StepDone)
    assert (after_release.stats.num_held_blocks, after_release.stats.num_free_blocks) == (0, 16)
    harness.assert_nothing_is_left()


def test_an_abort_says_what_had_been_computed() -> None:
    """Whoever leaves in the middle of a prompt pays for that much of it."""
    harness = EngineHarness(max_num_batched_tokens=8)
    prompt = list(range(1, 21))
    harness.add("waits", prompt)
    assert harness.core.handle(AbortRequest("waits"))[0] == RequestAborted("waits")
    for mode in ("aggregated", "prefill"):
        harness.add("a", prompt, mode=mode)
        harness.step()
        aborted, _ = harness.core.handle(AbortRequest("a"))
        assert isinstance(aborted, RequestAborted)
        assert aborted.num_computed_tokens + aborted.num_cached_tokens == 8
        assert aborted.num_computed_tokens > 0 and aborted.num_generated_tokens == 0
    assert harness.core.handle(AbortRequest("nobody's"))[0] == RequestAborted("nobody's")
    harness.assert_nothing_is_left()


def test_regions_are_the_runners_affair() -> None:
    harness = EngineHarness()
    assert harness.core.handle(MapRegion("r", 4096, 4, 0), 7) == []
    assert harness.runner.regions == {"r": 7}
    assert harness.core.handle(UnmapRegion("r")) == []
    assert harness.runner.regions == {}
    assert harness.core.handle(Shutdown()) == []


def test_a_region_that_cannot_be_mapped_fails_its_slabs_and_nothing_else() -> None:
    harness = EngineHarness()
    harness.runner.unmappable_regions = {"prefill"}
    harness.runner.stale_slots = {20}
    assert harness.core.handle(MapRegion("prefill", 4096, 4, 0), 7) == []
    harness.add("d", [1, 2, 3], mode="decode", max_tokens=2)
    (event,) = harness.core.handle(slab("d", 0, [20]))
    assert isinstance(event, SlabImported)
    assert event.error
    harness.core.handle(Recompute("d"))
    assert tokens_of(harness.run(), "d") == [1003, 1004]
    harness.assert_nothing_is_left()


def test_generations_are_written_where_the_runner_keeps_them() -> None:
    harness = EngineHarness(num_blocks=2)
    harness.add("a", [1, 2, 3, 4, 5], max_tokens=1)
    harness.run()
    assert list(harness.runner.generations) == [1, 1]
    harness.assert_nothing_is_left()


def test_a_request_that_breaks_a_step_fails_alone() -> None:
    harness = EngineHarness()
    harness.add("good", [1, 2, 3], max_tokens=2)
    harness.add("bad", [1, 2, 3], max_tokens=2)
    harness.runner.breaks_with = RequestsFailed(["bad"], "logits are not numbers")
    done = harness.step()
    assert done.outputs == []
    assert harness.core.take_failures() == [RequestFailed("bad", "logits are not numbers")]
    assert harness.core.take_failures() == []
    assert tokens_of(harness.run(), "good") == [1003, 1004]
    harness.assert_nothing_is_left()


def test_any_other_error_of_the_runner_ends_the_engine() -> None:
    harness = EngineHarness()
    harness.add("a", [1, 2, 3])
    harness.runner.breaks_with = RuntimeError("CUDA error")
    with pytest.raises(RuntimeError, match="CUDA error"):
        harness.core.step()
    harness.runner.breaks_with = RequestsFailed(["not in this step"], "who?")
    with pytest.raises(RequestsFailed):
        harness.core.step()


def test_steps_are_counted_and_timed() -> None:
    harness = EngineHarness()
    harness.add("a", [1, 2, 3], max_tokens=3)
    harness.run()
    assert harness.counter("steps") == 3
    assert harness.counter("tokens_generated") == 3
    assert harness.counter("step_seconds") > 0
    harness.assert_nothing_is_left()
