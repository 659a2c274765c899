"""Tests what happens while a step runs: commands, plans, failures; each test ends with nothing left."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tandem_engine.core import RequestsFailed
from tandem_engine.messages import (
    AbortRequest,
    AddRequest,
    BlocksSealed,
    EngineEvent,
    Pong,
    PrefixBlock,
    Recompute,
    Refused,
    ReleaseHeld,
    RequestAborted,
    RequestFailed,
    RequestOutput,
    Reserved,
    SlabImported,
    StartDecode,
    StepDone,
)
from tandem_engine.messages import Ping as AskIfAlive
from tandem_engine.sampling_params import SamplingParams
from tests.tandem_engine.scheduling.harness import ROOT, STOP, EngineHarness, extent, kv_of, slab, tokens_of


def _busy(harness: EngineHarness) -> list[EngineEvent]:
    """End the running step, launch the next one and let it run; return the events of the one that ended."""
    harness.runner.is_busy = False
    events = harness.turn()
    harness.runner.is_busy = True
    return events + (harness.turn() if harness.core.has_work() else [])


def _run_out(harness: EngineHarness) -> list[EngineEvent]:
    harness.runner.is_busy = False
    events: list[EngineEvent] = []
    while harness.core.has_work():
        events += harness.turn()
    harness.assert_nothing_is_left()
    return events


def _outputs(events: Sequence[EngineEvent]) -> list[RequestOutput]:
    return [output for event in events if isinstance(event, StepDone) for output in event.outputs]


def test_the_next_step_is_launched_before_the_last_one_is_reported() -> None:
    harness = EngineHarness(overlaps=True)
    harness.add("a", [1, 2, 3], max_tokens=3)
    launched_before: list[int] = []

    def emit(event: EngineEvent) -> None:
        assert isinstance(event, StepDone)
        launched_before.append(harness.core.scheduler.num_steps - event.step)

    while harness.core.has_work():
        harness.core.run_step(emit)
    assert launched_before == [1, 1, 0]
    assert harness.runner.steps == [[("a", 0, 3)], [("a", 3, 1)], [("a", 4, 1)]]
    harness.assert_nothing_is_left()


def test_commands_are_carried_out_while_a_step_runs() -> None:
    harness = EngineHarness(overlaps=True)
    harness.add("a", [1, 2, 3], max_tokens=2)
    assert _busy(harness) == []
    assert harness.core.handle(AskIfAlive()) == [Pong()]
    assert harness.add("b", [1, 2, 3], max_tokens=2) == [Reserved("b", 0)]
    assert harness.add("d", [1, 2, 3, 4, 5], max_tokens=2, mode="decode") == [Reserved("d", 0)]
    (imported,) = harness.core.handle(slab("d", 0, [20, 21]))
    assert isinstance(imported, SlabImported) and not imported.error
    assert harness.core.handle(StartDecode("d", [1005])) == []
    assert harness.turn() == []
    outputs = _outputs(_run_out(harness))
    assert [tokens_of(outputs, name) for name in ("a", "b", "d")] == [[1003, 1004], [1003, 1004], [1006]]


def test_an_abort_waits_for_the_step_that_writes_the_requests_blocks() -> None:
    harness = EngineHarness(num_blocks=2, overlaps=True)
    harness.add("a", [1, 2, 3, 4, 5], max_tokens=3)
    harness.add("waits", [1, 2, 3, 4, 5], max_tokens=1)
    _busy(harness)
    # 1. The step goes on and keeps its blocks; a command that follows waits, too.
    assert harness.core.handle(AbortRequest("a")) == []
    assert harness.core.handle(AddRequest("a", [1, 2], 2, SamplingParams(max_tokens=1))) == []
    assert (harness.pool.num_used, harness.turn()) == (2, [])
    # 2. A request that does not run is aborted at once.
    aborted, _ = harness.core.handle(AbortRequest("waits"))
    assert aborted == RequestAborted("waits")
    # 3. The step ends: first its token, then what was asked meanwhile, in that order.
    harness.runner.is_busy = False
    done, late, stats, reserved = harness.turn()
    assert isinstance(done, StepDone) and tokens_of(done.outputs, "a") == [1005]
    assert isinstance(late, RequestAborted) and (late.num_computed_tokens, late.num_generated_tokens) == (5, 1)
    assert isinstance(stats, StepDone) and reserved == Reserved("a", 0)
    assert tokens_of(_outputs(_run_out(harness)), "a") == [1002]


def test_an_abort_behind_the_last_token_finds_nobody() -> None:
    harness = EngineHarness(overlaps=True)
    harness.add("a", [1, 2, 3], max_tokens=1)
    _busy(harness)
    assert harness.core.handle(AbortRequest("a")) == []
    events = _run_out(harness)
    assert tokens_of(_outputs(events), "a") == [1003]
    assert RequestAborted("a") in events


def test_a_prefill_is_sealed_while_its_step_runs_and_released_behind_it() -> None:
    harness = EngineHarness(overlaps=True)
    harness.add("p", [1, 2, 3, 4, 5], mode="prefill")
    (sealed,) = _busy(harness)
    assert isinstance(sealed, BlocksSealed)
    assert [len(each.slots) for each in sealed.sealed] == [2]
    assert harness.core.handle(ReleaseHeld("p")) == []
    assert harness.pool.num_used == 2
    events = _run_out(harness)
    assert tokens_of(_outputs(events), "p") == [1005]
    assert not any(isinstance(event, BlocksSealed) for event in events)


def test_a_decode_that_computes_its_prompt_gets_a_late_first_token_behind_the_step() -> None:
    """The step samples it already: the late one changes nothing."""
    harness = EngineHarness(overlaps=True)
    harness.add("d", [1, 2, 3], mode="decode", max_tokens=3)
    harness.core.handle(Recompute("d"))
    _busy(harness)
    assert harness.core.handle(StartDecode("d", [1003])) == []
    assert tokens_of(_outputs(_run_out(harness)), "d") == [1003, 1004, 1005]


def test_answers_get_their_next_blocks_while_a_step_runs() -> None:
    harness = EngineHarness(overlaps=True)
    harness.add("a", [1, 2, 3, 4], max_tokens=3)
    harness.add("ends", [1, 2, 3, 4], max_tokens=1)
    harness.add("p", [1, 2, 3, 4], mode="prefill")
    _busy(harness)
    used = {request.request_id: len(request.block_table) for request in harness.core.scheduler._running}
    assert used == {"a": 2, "ends": 1, "p": 1}
    harness.core.handle(ReleaseHeld("p"))
    assert tokens_of(_outputs(_run_out(harness)), "a") == [1004, 1005, 1006]


def test_planning_evicts_nothing() -> None:
    """The only block that is not used has content: its owner's next request finds it in the same step."""
    harness = EngineHarness(num_blocks=3, overlaps=True)
    harness.add("first", [1, 2, 3, 4, 5], max_tokens=1, root=ROOT)
    _run_out(harness)
    harness.add("a", [9, 8, 7, 6, 5], max_tokens=8)
    _busy(harness)
    _busy(harness)
    assert (harness.pool.num_free, harness.pool.num_cached) == (0, 1)
    _busy(harness)
    _busy(harness)
    assert harness.pool.num_cached == 1, "position 7 runs, position 8 needs a block"
    _busy(harness)
    assert harness.pool.num_cached == 0
    assert tokens_of(_outputs(_run_out(harness)), "a") == [1009, 1010, 1011, 1012]


def test_a_request_that_stops_gives_the_block_of_its_plan_back() -> None:
    harness = EngineHarness(overlaps=True)
    harness.runner.stop_positions = {4}
    harness.add("a", [1, 2, 3, 4], max_tokens=9)
    _busy(harness)
    assert harness.pool.num_used == 2
    assert tokens_of(_outputs(_run_out(harness)), "a") == [STOP]


@pytest.mark.parametrize("part", ["launch", "sampling"])
def test_a_request_that_breaks_a_step_fails_alone_and_the_others_lose_nothing(part: str) -> None:
    harness = EngineHarness(overlaps=True)
    harness.add("good", [1, 2, 3, 4], max_tokens=2)
    harness.add("bad", [1, 2, 3], max_tokens=2)
    error = RequestsFailed(["bad"], "logits are not numbers")
    if part == "launch":
        harness.runner.breaks_with = error
    else:
        harness.runner.breaks_when_sampling = error
    events = _busy(harness)
    if part == "sampling":  # else the step is over already
        assert harness.core.handle(AbortRequest("bad")) == []
    events += _run_out(harness)
    assert RequestFailed("bad", "logits are not numbers") in events
    assert tokens_of(_outputs(events), "good") == [1004, 1005]
    assert tokens_of(_outputs(events), "bad") == []


def test_a_plan_counts_the_blocks_of_all_groups() -> None:
    """A table of a group with a window ends with the longest run, here with the prompt: its next block comes later."""
    harness = EngineHarness(24, overlaps=True, max_num_batched_tokens=8, num_window_groups=1, group_window=4)
    harness.add("a", [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=6)
    _busy(harness)
    (request,) = harness.core.scheduler._running
    assert [len(table) for table in request.tables] == [3, 2]
    assert tokens_of(_outputs(_run_out(harness)), "a") == [1008, 1009, 1010, 1011, 1012, 1013]


def test_a_planned_answer_may_be_preempted() -> None:
    """It has room for its next token, when an answer of a higher rank needs a block and none is left."""
    harness = EngineHarness(num_blocks=4, overlaps=True)
    harness.add("high", [1, 2, 3], max_tokens=10, priority=1)
    harness.add("low", [1], max_tokens=10)
    outputs: list[RequestOutput] = []
    while harness.core.has_work():
        outputs += _outputs(_busy(harness))
    assert harness.counter("preemptions") == 1
    assert [run for run in harness.runner.steps[6] if run[0] == "low"] == []
    assert tokens_of(outputs, "high") == list(range(1003, 1013))
    assert tokens_of(outputs, "low") == list(range(1001, 1011))
    _run_out(harness)


def test_a_refused_request_leaves_a_running_step_alone() -> None:
    harness = EngineHarness(overlaps=True)
    harness.add("a", [1, 2, 3], max_tokens=2)
    _busy(harness)
    (refused,) = harness.add("b", [1] * 70, max_tokens=2)
    assert isinstance(refused, Refused)
    assert tokens_of(_outputs(_run_out(harness)), "a") == [1003, 1004]


def test_a_prefix_is_loaded_while_steps_run() -> None:
    """One block spends the budget of a step. Between two steps only the first one is copied, when it is admitted."""
    harness = EngineHarness(overlaps=True, step_seconds=lambda output: 0.001)
    harness.runner.copy_seconds = 0.011
    prompt = list(range(1, 14))
    for slot in range(3):
        harness.runner.remote[slot] = kv_of(prompt)[4 * slot : 4 * slot + 4]
    harness.add("a", [1, 2, 3], max_tokens=9)
    _busy(harness)
    prefix = [PrefixBlock(slot, extent(slot, 4 << 20)) for slot in range(3)]
    harness.add("b", prompt, max_tokens=1, root=ROOT, prefix=prefix)
    harness.runner.is_busy = False
    harness.turn()
    assert len(harness.runner.imported) == 1
    harness.runner.is_busy = True
    harness.turn()
    assert len(harness.runner.imported) == 2
    events = _run_out(harness)
    assert len(harness.runner.imported) == 3
    (output,) = [each for each in _outputs(events) if each.request_id == "b"]
    assert (output.token_ids, output.num_loaded_tokens, output.num_computed_tokens) == ([1013], 12, 1)
    assert tokens_of(_outputs(events), "a") == list(range(1004, 1012))
