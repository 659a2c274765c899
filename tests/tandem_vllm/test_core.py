"""Tests that the messages of a front get the answers that our own engine gives, with recorded steps of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tandem_engine.messages import (
    AbortRequest,
    AddRequest,
    EngineEvent,
    EngineStats,
    ExtentRef,
    ImportSlab,
    Mode,
    Ping,
    Pong,
    PrefixBlock,
    Refused,
    RequestAborted,
    RequestFailed,
    RequestOutput,
    Reserved,
    SlabImported,
    StepDone,
)
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.request import Request, Sampled
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_vllm.core import EngineStep, Pool, Run, VllmCore

CONFIG = SchedulerConfig(num_blocks=8, block_size=32, context_length=100, vocab_size=200, max_num_waiting=3)


class RecordedEngine:
    """vLLM as its recording shows it: the steps are given, and what is asked of it is kept."""

    def __init__(self, steps: Iterable[EngineStep] = ()) -> None:
        self.steps = list(steps)
        self.queued: list[str] = []
        self.aborted: list[str] = []
        self.is_ready = True

    def prepare(self, request: Request) -> bool:
        return self.is_ready

    def add(self, request: Request) -> None:
        self.queued.append(request.request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.steps)

    @property
    def num_running(self) -> int:
        return 1

    @property
    def num_preempted(self) -> int:
        return 0

    @property
    def pool(self) -> Pool:
        return Pool(8, 5, 1, 2)

    def step(self) -> EngineStep:
        return self.steps.pop(0)


def core_with(*steps: EngineStep) -> tuple[VllmCore, RecordedEngine]:
    engine = RecordedEngine(steps)
    times = iter(range(1000, 10000))
    return VllmCore(CONFIG, engine, clock=lambda: next(times)), engine


def handle(core: VllmCore, command: Any) -> Sequence[EngineEvent]:
    events = core.handle_some(command)
    assert events is not None, "there is no slab to go on with"
    return events


def request(
    request_id: str, num_tokens: int, *, answer: int = 0, mode: Mode = "aggregated", max_tokens: int = 4, **more: Any
) -> AddRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=(9,))
    return AddRequest(request_id, list(range(1, 1 + num_tokens)), num_tokens - answer, sampling, mode, **more)


def run_all(core: VllmCore) -> list[Any]:
    events: list[Any] = []
    while core.has_work():
        core.run_step(events.append)
    return events


def outputs_of(events: list[Any]) -> list[RequestOutput]:
    return [output for event in events if isinstance(event, StepDone) for output in event.outputs]


def last_stats(events: list[Any]) -> EngineStats:
    return [event for event in events if isinstance(event, StepDone)][-1].stats


def test_an_answer_is_counted_from_its_chunks_to_its_stop_token() -> None:
    core, engine = core_with(
        EngineStep([Run("a", 32, 3)]),  # vLLM found a block of 32 tokens, and computes the prompt in two chunks
        EngineStep([Run("a", 35, 5)], {"a": Sampled(4)}),
        EngineStep([Run("a", 40, 1)], {"a": Sampled(9)}, finished=frozenset({"a"})),
    )
    assert handle(core, request("a", 40)) == [Reserved("a", 0)]
    events = run_all(core)
    first, last = outputs_of(events)
    assert (first.token_ids, first.position, first.finish_reason, first.is_last) == ([4], 40, None, False)
    assert (last.token_ids, last.position, last.finish_reason, last.is_last) == ([9], 41, "stop", True)
    assert (last.num_cached_tokens, last.num_computed_tokens, last.num_generated_tokens) == (32, 8, 2)
    assert last.times.added_ns < last.times.scheduled_ns < last.times.first_token_ns < last.times.finished_ns
    counters = last_stats(events).counters
    assert counters["prompt_tokens_cached"] + counters["prompt_tokens_computed"] == 40
    assert counters["tokens_generated"] == 2 and counters["steps"] == 3
    assert engine.aborted == ["a"], "what vLLM has finished by itself may be aborted once more"


def test_an_answer_that_moved_here_ends_with_its_whole_length() -> None:
    core, _ = core_with(
        EngineStep([Run("a", 0, 12)], {"a": Sampled(4)}), EngineStep([Run("a", 12, 1)], {"a": Sampled(4)})
    )
    handle(core, request("a", 12, answer=2))
    first, last = outputs_of(run_all(core))
    assert (first.finish_reason, last.finish_reason) == (None, "length")
    assert (last.num_computed_tokens, last.num_generated_tokens) == (10, 2)


def test_a_preempted_request_counts_its_prompt_once() -> None:
    core, _ = core_with(
        EngineStep([Run("a", 0, 40)], {"a": Sampled(4)}),
        EngineStep([Run("a", 32, 9)], {"a": Sampled(4)}),  # preempted, then 32 tokens were found
        EngineStep([Run("a", 41, 1)], {"a": Sampled(9)}),
    )
    handle(core, request("a", 40))
    events = run_all(core)
    last = outputs_of(events)[-1]
    assert (last.num_preemptions, last.num_computed_tokens, last.num_cached_tokens) == (1, 40, 0)
    assert last_stats(events).counters["preemptions"] == 1


def test_a_request_that_fails_ends_alone() -> None:
    failure = RequestFailed("b", "the grammar has no continuation", is_callers_fault=True)
    core, engine = core_with(EngineStep([Run("a", 0, 5), Run("b", 0, 5)], {"a": Sampled(4)}, [failure]))
    handle(core, request("a", 5))
    handle(core, request("b", 5))
    events = run_all(core)
    assert [output.request_id for output in outputs_of(events)] == ["a"]
    assert events[-1] == failure and engine.aborted == ["b"]
    assert last_stats(events).num_running + last_stats(events).num_waiting == 1


def test_an_abort_reports_what_was_done_and_an_unknown_request_is_nothing() -> None:
    core, engine = core_with(EngineStep([Run("a", 0, 5)], {"a": Sampled(4)}))
    handle(core, request("a", 5))
    run_all(core)
    aborted, done = handle(core, AbortRequest("a"))
    assert aborted == RequestAborted("a", num_computed_tokens=5, num_generated_tokens=1)
    assert isinstance(done, StepDone) and done.stats.num_tokens_in_flight == 0
    assert engine.aborted == ["a"]
    assert handle(core, AbortRequest("a"))[0] == RequestAborted("a")


def test_refusals_name_their_reason_and_leave_nothing() -> None:
    core, engine = core_with()
    refused = [
        handle(core, request("long", 101)),
        handle(core, request("empty", 0)),
        handle(core, request("pf", 5, mode="prefill")),
        handle(core, request("dc", 5, mode="decode")),
    ]
    reasons = [event.reason for (event,) in refused if isinstance(event, Refused)]
    assert reasons == ["context", "invalid", "unsupported", "unsupported"]
    for name in "abc":
        assert isinstance(handle(core, request(name, 5))[0], Reserved)
    (full,) = handle(core, request("d", 5))
    (twice,) = handle(core, request("a", 5))
    assert isinstance(full, Refused) and full.reason == "queue_full" and "--max-num-waiting" in full.message
    assert isinstance(twice, Refused) and twice.reason == "invalid"
    assert engine.queued == ["a", "b", "c"]


def test_a_request_waits_for_its_grammar_outside_of_vllm() -> None:
    core, engine = core_with()
    engine.is_ready = False
    handle(core, request("a", 5))
    handle(core, request("b", 5))
    handle(core, AbortRequest("b"))
    core.begin_turn()
    assert core.is_held() and not engine.queued and not engine.aborted
    engine.is_ready = True
    core.begin_turn()
    assert engine.queued == ["a"] and not core.is_held()


def test_blocks_of_others_are_let_go_and_never_read() -> None:
    core, _ = core_with()
    extent = ExtentRef("region", 0, 0, 1, 1)
    handle(core, request("a", 40, prefix=[PrefixBlock(0, extent)]))
    _, done = handle(core, AbortRequest("x"))
    assert isinstance(done, StepDone) and done.admitted == ["a"]
    (imported,) = handle(core, ImportSlab("a", 3, 0, [extent]))
    assert isinstance(imported, SlabImported) and imported.error and imported.slab_index == 3
    assert handle(core, Ping()) == [Pong()]
