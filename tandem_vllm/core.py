"""Carries out the messages of a front with vLLM: checks and counts requests, and turns vLLM's steps into StepDone.

vLLM decides which requests run in a step. Everything that others see is decided here with the classes of our own
engine: refusals, the end of an answer, the ledger. This module imports neither torch nor vLLM; `Engine` computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tandem_engine.messages import (
    AbortRequest,
    AddRequest,
    EngineEvent,
    EngineStats,
    ImportSlab,
    Ping,
    Pong,
    Refused,
    RequestAborted,
    RequestFailed,
    RequestOutput,
    Reserved,
    SlabImported,
    StepDone,
)
from tandem_engine.scheduling.admission import RequestRefused, build_request, check_places
from tandem_engine.scheduling.ledger import Ledger
from tandem_engine.scheduling.request import Request, RequestState, Sampled
from tandem_engine.scheduling.scheduler_config import SchedulerConfig


class Run(NamedTuple):
    """Tokens [first_position, first_position + num_tokens) of one request, computed in one step."""

    request_id: str
    first_position: int
    num_tokens: int


class EngineStep(NamedTuple):
    """What vLLM did in one step."""

    runs: Sequence[Run] = ()
    sampled: Mapping[str, Sampled] = {}
    """The next token of each request whose run ended with its last known token, but for those that failed."""
    failures: Sequence[RequestFailed] = ()
    finished: frozenset[str] = frozenset()
    """Requests that vLLM has finished by itself, and forgotten."""


class Pool(NamedTuple):
    """Blocks of vLLM's pool: total = free + cached + used."""

    num_total: int
    num_free: int
    num_cached: int
    """At least so many have content that can be found, and no user."""
    num_used: int


class Engine(Protocol):
    """vLLM."""

    def prepare(self, request: Request) -> bool:
        """Start to compile a request's grammar; return whether it is ready."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request that is prepared."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request, in whatever state."""
        ...

    @property
    def has_work(self) -> bool: ...

    @property
    def num_running(self) -> int: ...

    @property
    def pool(self) -> Pool: ...

    def step(self) -> EngineStep: ...


class VllmCore:
    """Implements `tandem_engine.process.Core` for aggregated requests."""

    def __init__(
        self,
        config: SchedulerConfig,
        engine: Engine,
        clock: Callable[[], int] = time.time_ns,
        adapters: Collection[str] = (),
    ) -> None:
        """`clock` returns nanoseconds since 1970; `adapters` are the names that requests may have."""
        self._adapters = adapters
        self._config = config
        self._engine = engine
        self._clock = clock
        self._ledger = Ledger(clock)
        self._requests: dict[str, Request] = {}
        self._unprepared: dict[str, Request] = {}
        """Requests whose grammar is being compiled; vLLM does not have them yet."""
        self._num_arrivals = 0
        self._num_steps = 0
        self._admitted: list[str] = []

    def begin_turn(self) -> None:
        """Queue the requests whose grammars are ready by now."""
        for request in [each for each in self._unprepared.values() if self._engine.prepare(each)]:
            del self._unprepared[request.request_id]
            self._engine.add(request)

    def has_work(self) -> bool:
        return self._engine.has_work

    def is_held(self) -> bool:
        return bool(self._unprepared)

    def handle_some(self, command: Any, *_: int) -> Sequence[EngineEvent]:
        """Carry out a command at once, and return its events."""
        match command:
            case AddRequest():
                return self._add(command)
            case AbortRequest(request_id):
                return [self._abort(request_id), self._done([])]
            case ImportSlab(request_id, slab_index):
                return [SlabImported(request_id, slab_index, 0, "this engine imports no blocks")]
            case Ping():
                return [Pong()]
        return []  # those of requests that were never accepted, and regions that nothing is read from

    def run_step(self, emit: Callable[[Any], None]) -> None:
        """Run one step and emit its events, those of requests that failed in it included."""
        started = time.monotonic_ns()
        step = self._engine.step()
        self._num_steps += 1
        self._ledger.count("steps")
        failed = {failure.request_id for failure in step.failures}
        is_answer_among_them = self._count_runs(step.runs)
        outputs = [self._output(request_id, token, step.finished) for request_id, token in step.sampled.items()]
        for request_id in failed:
            self._forget(request_id)
        seconds = (time.monotonic_ns() - started) / 1e9
        self._ledger.count("step_seconds", seconds)
        if is_answer_among_them:
            self._ledger.record_longest("longest_answer_step_seconds", seconds)
        emit(self._done(outputs))
        for failure in step.failures:
            emit(failure)

    def wake_fd(self) -> None:
        return None

    def close(self) -> None: ...

    def _add(self, command: AddRequest) -> list[EngineEvent]:
        try:
            request = self._accepted(command)
        except RequestRefused as refusal:
            return [Refused(command.request_id, refusal.reason, refusal.message)]
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        if self._engine.prepare(request):
            self._engine.add(request)
        else:
            self._unprepared[request.request_id] = request
        if command.prefix:  # nothing is read from there: what holds these blocks for us may let go
            self._admitted.append(request.request_id)
        return [Reserved(request.request_id, 0)]

    def _accepted(self, command: AddRequest) -> Request:
        if command.request_id in self._requests:
            raise RequestRefused("invalid", f"request {command.request_id} is here already")
        if command.mode != "aggregated":
            message = f"mode {command.mode} is not built with vLLM; start decode workers alone, which prefill too"
            raise RequestRefused("unsupported", message)
        request = build_request(
            command,
            self._config,
            arrival=self._num_arrivals,
            added_ns=self._clock(),
            adapters=self._adapters,
        )
        waiting = [each for each in self._requests.values() if each.state is RequestState.WAITING]
        num_of_key = sum(each.fairness_key == request.fairness_key for each in waiting)
        check_places(self._config.max_num_waiting, len(waiting), num_of_key, request)
        return request

    def _count_runs(self, runs: Sequence[Run]) -> bool:
        """Count the tokens that were computed; return whether an answer was among the runs."""
        is_answer_among_them = False
        for request_id, first, num_tokens in runs:
            request = self._requests[request_id]
            self._ledger.scheduled([request])
            if request.state is RequestState.WAITING:
                request.state = RequestState.RUNNING
                self._ledger.found(request, first)
            elif first < request.num_computed_tokens:
                self._ledger.preempted(request)
                self._ledger.found(request, first)
            self._ledger.computed(request, first, num_tokens)
            request.num_computed_tokens = first + num_tokens
            is_answer_among_them |= num_tokens == 1 and first + 1 > request.num_initial_tokens
        return is_answer_among_them

    def _output(self, request_id: str, token: Sampled, finished: frozenset[str]) -> RequestOutput:
        request = self._requests[request_id]
        reason = request.finish_reason_with((token.token_id,), self._config.context_length)
        self._ledger.sampled(request)
        output = self._ledger.output(request, (token,), reason, is_last=reason is not None)
        request.token_ids.append(token.token_id)
        if reason is not None:
            self._forget(request_id)
        assert (request_id in finished) <= (reason is not None), f"vLLM ended {request_id} before its end"
        return output

    def _abort(self, request_id: str) -> RequestAborted:
        request = self._requests.get(request_id)
        if request is None:
            return RequestAborted(request_id)
        self._forget(request_id)
        return RequestAborted(
            request_id,
            num_computed_tokens=request.num_prompt_tokens_computed,
            num_cached_tokens=request.num_cached_tokens,
            num_loaded_tokens=request.num_loaded_tokens,
            num_generated_tokens=request.num_generated_tokens,
        )

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        request.state = RequestState.FINISHED
        if self._unprepared.pop(request_id, None) is None:
            self._engine.abort(request_id)

    def _done(self, outputs: list[RequestOutput]) -> StepDone:
        admitted, self._admitted = self._admitted, []
        return StepDone(self._num_steps, outputs, [], self._stats(), [], admitted)

    def _stats(self) -> EngineStats:
        pool, num_running = self._engine.pool, self._engine.num_running
        return EngineStats(
            num_running=num_running,
            num_waiting=max(0, len(self._requests) - num_running),
            num_tokens_in_flight=sum(request.num_tokens for request in self._requests.values()),
            num_total_blocks=pool.num_total,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_used_blocks=pool.num_used,
            num_held_blocks=0,
            counters=dict(self._ledger.counters),
        )
