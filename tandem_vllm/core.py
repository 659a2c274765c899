"""Carries out the messages of a front with vLLM: checks and counts requests, and turns vLLM's steps into StepDone.

vLLM decides which requests run in a step. Everything that others see is decided here with the classes of our own
engine: refusals, the end of an answer, the ledger. This module imports neither torch nor vLLM; `Engine` computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tandem_engine.messages import (
    AbortRequest,
    AddRequest,
    EngineEvent,
    EngineStats,
    ImportSlab,
    MapRegion,
    Ping,
    Pong,
    Recompute,
    Refused,
    ReleaseHeld,
    ReleaseSlabs,
    RequestAborted,
    RequestOutput,
    Reserved,
    SlabImported,
    StartDecode,
    StepDone,
    UnmapRegion,
)
from tandem_engine.scheduling import answers
from tandem_engine.scheduling.admission import RequestRefused, build_request, check_places
from tandem_engine.scheduling.copy_budget import CopyBudget
from tandem_engine.scheduling.ledger import Ledger
from tandem_engine.scheduling.request import Request, RequestState, Sampled
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_vllm.hand_over import Exchange, HandOver
from tandem_vllm.steps import Engine as Engine
from tandem_vllm.steps import EngineStep as EngineStep
from tandem_vllm.steps import Pool as Pool
from tandem_vllm.steps import Run as Run

_NO_EXCHANGE = (
    "this vLLM engine cannot hand blocks over, because its pool is not in this process or its prefix cache is off; "
    "start decode workers alone, which prefill too"
)
_LIVE = (RequestState.IMPORTING, RequestState.READY, RequestState.RUNNING)
_MAX_EMPTY_STEPS = 2
"""vLLM's last step only tells the model runner what has ended, and one more may have waited for a load."""


class VllmCore:
    """Implements `tandem_engine.process.Core`."""

    def __init__(
        self,
        config: SchedulerConfig,
        engine: Engine,
        clock: Callable[[], int] = time.time_ns,
        exchange: Exchange | None = None,
        monotonic: Callable[[], int] = time.monotonic_ns,
        adapters: Collection[str] = (),
    ) -> None:
        """`clock` returns nanoseconds since 1970; `adapters` are the names that requests may have.

        Without `exchange` all requests must be aggregated.
        """
        self._adapters = adapters
        self._config = config
        self._engine = engine
        self._clock = clock
        self._ledger = Ledger(clock)
        self._budget = CopyBudget(monotonic)
        self._requests: dict[str, Request] = {}
        self._hand_over: HandOver | None = None
        if exchange is not None:
            self._hand_over = HandOver(config, exchange, self._requests, self._ledger, self._budget, monotonic)
        self._unprepared: dict[str, Request] = {}
        """Requests whose grammar is being compiled; vLLM does not have them yet."""
        self._blocked: dict[str, Request] = {}
        """Prefills that wait for blocks; vLLM does not have them yet, because it could preempt what others read. While
        blocks are kept for a refused hand-over, other requests too."""
        self._early_outputs: list[RequestOutput] = []
        """Of requests that ended before they ran."""
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_empty_steps = 0
        self._admitted: list[str] = []

    def begin_turn(self) -> None:
        """Queue the requests whose grammars are ready by now."""
        self._budget.renew()
        for request in [each for each in self._unprepared.values() if self._engine.prepare(each)]:
            del self._unprepared[request.request_id]
            self._enqueue(request)

    def has_work(self) -> bool:
        """Whether a step would do anything. A wait for blocks that only a command can free is not work."""
        if self._early_outputs or self._next_blocked() is not None:
            return True
        if self._hand_over is not None and (self._hand_over.publisher.is_copying or self._hand_over.is_loading):
            return True
        return self._engine.has_work and self._num_empty_steps < _MAX_EMPTY_STEPS

    def is_held(self) -> bool:
        return bool(self._unprepared) or (bool(self._blocked) and self._is_refused_due)

    def handle_some(self, command: Any, *fds: int) -> Sequence[EngineEvent] | None:
        """Carry out a command, and return its events. None: the rest of a slab is copied after the next step."""
        with self._budget.command():
            return self._carry_out(command, fds)

    def _carry_out(self, command: Any, fds: Sequence[int]) -> Sequence[EngineEvent] | None:
        hand_over = self._hand_over
        match command:
            case Ping():
                return [Pong()]
            case ImportSlab(request_id, slab_index):
                if hand_over is None:
                    return [SlabImported(request_id, slab_index, 0, _NO_EXCHANGE)]
                imported = hand_over.importer.import_some(command)
                return None if imported is None else [imported]
            case MapRegion() if hand_over is not None:
                hand_over.map_region(command, fds)
                return []
            case UnmapRegion(region_id) if hand_over is not None:
                hand_over.unmap_region(region_id)
                return []
        self._num_empty_steps = 0
        match command:
            case AddRequest():
                return self._add(command)
            case StartDecode(request_id, token_ids):
                self._start_decode(request_id, token_ids)
            case Recompute(request_id):
                self._recompute(request_id)
            case AbortRequest(request_id):
                return [self._abort(request_id), self._done([])]
            case ReleaseHeld(request_id):
                self._release_held(request_id)
                return [self._done([])]
            case ReleaseSlabs(request_id, num_blocks) if hand_over is not None:
                hand_over.publisher.release(request_id, num_blocks)
                return [self._done([])]
        return []  # those of requests that were never accepted, and regions that nothing is read from

    def run_step(self, emit: Callable[[Any], None]) -> None:
        """Run one step and emit its events, those of requests that failed in it included."""
        started = time.monotonic_ns()
        self._admit_blocked()
        if self._hand_over is not None:
            self._hand_over.begin_step()
        outputs, self._early_outputs = self._early_outputs, []
        step = self._engine.step() if self._engine.has_work else EngineStep()
        self._num_steps += 1
        self._num_empty_steps = 0 if step.runs else self._num_empty_steps + 1
        if self._hand_over is not None:
            self._hand_over.end_step(is_empty=not step.runs)
        self._ledger.count("steps")
        failed = {failure.request_id for failure in step.failures}
        is_answer_among_them = self._count_runs(step.runs)
        for request_id, token in step.sampled.items():
            outputs += self._outputs(request_id, step.choices.get(request_id, (token,)), step.finished)
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

    # ------------------------------------------------------------------------------------------------ commands

    def _add(self, command: AddRequest) -> list[EngineEvent]:
        try:
            request = self._accepted(command)
        except RequestRefused as refusal:
            return [Refused(command.request_id, refusal.reason, refusal.message)]
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        if request.mode == "decode":
            self._engine.prepare(request)
        else:
            self._enqueue_prepared(request)
        if command.prefix and self._hand_over is None:  # nothing is read: what holds these blocks for us may let go
            self._admitted.append(request.request_id)
        return [Reserved(request.request_id, request.num_found_blocks)]

    def _accepted(self, command: AddRequest) -> Request:
        if command.request_id in self._requests:
            raise RequestRefused("invalid", f"request {command.request_id} is here already")
        if command.mode != "aggregated" and self._hand_over is None:
            raise RequestRefused("unsupported", f"mode {command.mode}: {_NO_EXCHANGE}")
        request = build_request(
            command, self._config, arrival=self._num_arrivals, added_ns=self._clock(), adapters=self._adapters
        )
        if request.mode == "prefill" and self._config.window is not None:
            self._find_nothing(request)
        if request.mode == "decode":
            self._reserve(request)
        else:
            waiting = [each for each in self._requests.values() if each.state is RequestState.WAITING]
            self._check_places(self._config.max_num_waiting, waiting, request)
        return request

    def _find_nothing(self, request: Request) -> None:
        """Compute a prompt as a whole: of a prefix that vLLM finds it has only the window, and all is handed over."""
        request.max_found_blocks = 0
        if request.prefix:
            request.prefix = {}
            self._admitted.append(request.request_id)

    def _reserve(self, request: Request) -> None:
        assert self._hand_over is not None, "checked by the caller"
        live = self._live()
        self._check_places(self._config.max_num_seqs + self._config.max_num_waiting, live, request)
        queue = [each for each in self._requests.values() if each.state is RequestState.WAITING]
        head = min(queue, key=lambda each: each.rank, default=None)
        self._hand_over.reserve(request, len(live), self._engine.num_preempted, head)

    def _live(self) -> list[Request]:
        """Return the requests that grow, or will."""
        return [each for each in self._requests.values() if each.mode != "prefill" and each.state in _LIVE]

    def _check_places(self, num_places: int, taken: Sequence[Request], request: Request) -> None:
        num_of_key = sum(each.fairness_key == request.fairness_key for each in taken)
        check_places(num_places, len(taken), num_of_key, request)

    def _start_decode(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Continue behind the first token, which prefill sampled; changes nothing for a request that sampled one."""
        request = self._requests.get(request_id)
        if request is None or request.mode != "decode" or request.num_tokens > request.num_initial_tokens:
            return
        request.token_ids.extend(token_ids)
        if reason := request.finish_reason_with((), self._config.context_length):
            self._early_outputs.append(self._ledger.output(request, (), reason, is_last=True))
            self._forget(request_id)
        elif request.state is RequestState.IMPORTING:
            self._begin_decoding(request)
        elif request_id not in self._unprepared:  # vLLM computes its prompt, and would draw the first token again
            self._engine.abort(request_id)
            self._engine.add(request)

    def _recompute(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.state is RequestState.IMPORTING:
            self._begin_decoding(request)

    def _begin_decoding(self, request: Request) -> None:
        assert self._hand_over is not None, "decode requests are refused without it"
        self._hand_over.bring(request)
        request.state = RequestState.READY
        self._enqueue_prepared(request)

    def _enqueue_prepared(self, request: Request) -> None:
        if self._engine.prepare(request):
            self._enqueue(request)
        else:
            self._unprepared[request.request_id] = request

    def _enqueue(self, request: Request) -> None:
        if request.mode == "prefill" or (request.mode == "aggregated" and self._is_refused_due):
            self._blocked[request.request_id] = request
            self._admit_blocked()
        else:
            self._give(request)

    def _give(self, request: Request) -> None:
        if self._hand_over is not None and request.mode != "decode":
            self._hand_over.bring_prefix(request)
        self._engine.add(request)
        self._num_empty_steps = 0

    def _admit_blocked(self) -> None:
        """Give prefills to vLLM in order, while all of those that it has, and this one, have room to their end.

        Others wait here only for a refused hand-over that has its turn: unless its blocks and theirs are free.
        """
        while (request := self._next_blocked()) is not None:
            del self._blocked[request.request_id]
            self._give(request)

    def _next_blocked(self) -> Request | None:
        if not self._blocked or self._hand_over is None:
            return None
        first = min(self._blocked.values(), key=lambda each: each.rank)
        num_kept = self._hand_over.num_kept_blocks(len(self._live()))
        if first.mode != "prefill" and not num_kept:
            return first
        begun = [each for each in self._requests.values() if each.mode == "prefill" and self._has_vllm(each)]
        num_missing = sum(self._hand_over.num_missing_blocks(each) for each in (*begun, first))
        return first if num_missing + num_kept <= self._hand_over.num_available_blocks else None

    @property
    def _is_refused_due(self) -> bool:
        return self._hand_over is not None and self._hand_over.is_refused_due

    def _has_vllm(self, request: Request) -> bool:
        is_outside = request.request_id in self._blocked or request.request_id in self._unprepared
        return not is_outside and request.state is not RequestState.HELD

    def _release_held(self, request_id: str) -> None:
        """Free a prefill's blocks, now or once it is done; other requests are ignored."""
        request = self._requests.get(request_id)
        if request is None or request.mode != "prefill":
            return
        assert self._hand_over is not None, "prefills are refused without it"
        self._hand_over.publisher.forget(request_id)
        if request.state is RequestState.HELD:
            self._forget(request_id)
        else:
            request.is_release_due = True

    def _abort(self, request_id: str) -> RequestAborted:
        request = self._requests.get(request_id)
        self._early_outputs = [output for output in self._early_outputs if output.request_id != request_id]
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
        is_outside = [self._unprepared.pop(request_id, None), self._blocked.pop(request_id, None)] != [None, None]
        if not is_outside and request.state not in (RequestState.IMPORTING, RequestState.HELD):
            self._engine.abort(request_id)
        if self._hand_over is not None:
            if request.mode == "prefill" and not request.is_release_due:
                self._hand_over.publisher.forget(request_id)
            self._hand_over.forget(request)
        request.state = RequestState.FINISHED

    # --------------------------------------------------------------------------------------------------- steps

    def _count_runs(self, runs: Sequence[Run]) -> bool:
        """Count the tokens that were computed; return whether an answer was among the runs."""
        is_answer_among_them = False
        for request_id, first, num_tokens, table in runs:
            request = self._requests[request_id]
            self._ledger.scheduled([request])
            if request.state in (RequestState.WAITING, RequestState.READY):
                request.state = RequestState.RUNNING
                self._find(request, first)
            elif first < request.num_computed_tokens:
                self._ledger.preempted(request)
                self._find(request, first)
            self._ledger.computed(request, first, num_tokens)
            request.num_computed_tokens = first + num_tokens
            if table and self._hand_over is not None:
                self._hand_over.computed(request, first, first + num_tokens, table)
            is_answer_among_them |= num_tokens == 1 and first + 1 > request.num_initial_tokens
        return is_answer_among_them

    def _find(self, request: Request, num_tokens: int) -> None:
        if request.mode != "decode":  # a decode's tokens were counted when it was added
            self._ledger.found(request, num_tokens)

    def _outputs(self, request_id: str, tokens: Sequence[Sampled], finished: frozenset[str]) -> list[RequestOutput]:
        request = self._requests[request_id]
        if request.mode == "prefill":
            return self._first_tokens(request, tokens)
        (token,) = tokens
        reason = request.finish_reason_with((token.token_id,), self._config.context_length)
        self._ledger.sampled(request)
        output = self._ledger.output(request, (token,), reason, is_last=reason is not None)
        request.token_ids.append(token.token_id)
        if reason is not None:
            self._forget(request_id)
        assert (request_id in finished) <= (reason is not None), f"vLLM ended {request_id} before its end"
        return [output]

    def _first_tokens(self, request: Request, tokens: Sequence[Sampled]) -> list[RequestOutput]:
        """Hold the blocks of a finished prefill and return its first tokens, one per choice."""
        assert self._hand_over is not None, "prefills are refused without it"
        assert len(tokens) == len(request.choice_seeds), f"{request.request_id}: one token per choice is due"
        outputs = answers.first_tokens(request, tokens, self._config.context_length, self._ledger)
        if request.is_release_due:
            self._forget(request.request_id)
        else:
            self._hand_over.hold(request)
        return outputs

    def _done(self, outputs: list[RequestOutput]) -> StepDone:
        admitted, self._admitted = self._admitted, []
        if (hand_over := self._hand_over) is None:
            return StepDone(self._num_steps, outputs, [], self._stats(), [], admitted)
        hand_over.publish()
        sealed, filled = hand_over.publisher.take_sealed(), hand_over.publisher.take_filled()
        stats = self._stats()
        stats.counters.update(hand_over.publisher.state)
        return StepDone(self._num_steps, outputs, sealed, stats, filled, [*admitted, *hand_over.take_admitted()])

    def _stats(self) -> EngineStats:
        self._ledger.record_longest("longest_copy_seconds", self._budget.longest_copies_ns / 1e9)
        self._ledger.record_longest("longest_copy_cpu_seconds", self._budget.longest_copies_cpu_ns / 1e9)
        self._ledger.record_longest("longest_commands_seconds", self._budget.longest_commands_ns / 1e9)
        pool, num_running = self._engine.pool, self._engine.num_running
        alive = [request for request in self._requests.values() if request.state is not RequestState.HELD]
        return EngineStats(
            num_running=num_running,
            num_waiting=max(0, len(alive) - num_running),
            num_tokens_in_flight=sum(request.num_tokens_in_flight for request in alive),
            num_total_blocks=pool.num_total,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_used_blocks=pool.num_used,
            num_held_blocks=self._hand_over.num_held_blocks if self._hand_over is not None else 0,
            counters=dict(self._ledger.counters),
        )
