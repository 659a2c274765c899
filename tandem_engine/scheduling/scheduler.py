"""Chooses the tokens of each step, and updates requests with the step's results.

`RequestState` shows the life of a request. Its blocks:

    aggregated, prefill   allocated for all known tokens when it leaves the queue; leading blocks from the prefix cache
    decode                allocated, or refused, when it is added
    answers               one more block whenever the last is full. If no block is free, the running request of the
                          lowest rank is preempted, never a prefill. Importing and held requests keep their blocks.

A step has answers first, then prompts that have begun, then the queue, in chunks that `Batch` limits. Drafts of answers
(`speculation`) come last: they change no token and take no block that others need. A preempted request computes its
tokens again, except those whose blocks are still in the prefix cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence

from tandem_engine.messages import (
    AddRequest,
    EngineStats,
    ExtentRef,
    ImportSlab,
    Refused,
    RequestOutput,
    Reserved,
    SealedBlocks,
)
from tandem_engine.scheduling import answers
from tandem_engine.scheduling.admission import RequestRefused, build_request, check_places, kv_full, max_kv_tokens
from tandem_engine.scheduling.batch import Batch, ScheduledRun, SchedulerOutput
from tandem_engine.scheduling.block_pool import BlockPool
from tandem_engine.scheduling.hand_over import import_targets, num_ready_tokens, seal
from tandem_engine.scheduling.kv_cache_manager import KVCacheManager
from tandem_engine.scheduling.ledger import Ledger, engine_stats
from tandem_engine.scheduling.prefix import Load, PrefixExchange
from tandem_engine.scheduling.request import Request, RequestState, Sampled
from tandem_engine.scheduling.running import RunningRequests
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.scheduling.speculation.speculator import Speculator
from tandem_engine.scheduling.waiting_queue import WaitingQueue
from tandem_engine.scheduling.window_groups import most_blocks

__all__ = ["ScheduledRun", "Scheduler", "SchedulerOutput"]


class Scheduler:
    """Owns every request and every block. `schedule` and `update` alternate; commands come between them."""

    def __init__(
        self,
        config: SchedulerConfig,
        generations: MutableSequence[int] | None = None,
        clock: Callable[[], int] = time.time_ns,
        load: Load = lambda blocks, extents: 0,
        prepare: Callable[[Request], bool] = lambda request: True,
    ) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size, generations)
        self._kv = KVCacheManager(self.pool, config)
        self._clock = clock
        self._prepare = prepare
        self._ledger = Ledger(clock)
        self.prefixes = PrefixExchange(self._kv, self._ledger, load)
        self.speculator = Speculator(config, self._kv)
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running = RunningRequests(config.max_num_seqs, self._waiting.served)
        self._early_outputs: list[RequestOutput] = []  # of requests that ended before they ran
        self.num_steps = self._num_arrivals = 0
        self._is_stalled = False

    # ------------------------------------------------------------------------------------------------- commands

    def add(self, command: AddRequest) -> Reserved | Refused:
        """Queue a request or reserve its blocks; a refused request leaves nothing behind."""
        self._is_stalled = False
        try:
            if command.request_id in self._requests:
                raise RequestRefused("invalid", f"request {command.request_id} is here already")
            request = build_request(command, self.config, arrival=self._num_arrivals, added_ns=self._clock())
            take = self._reserve if request.mode == "decode" else self._enqueue
            take(request)
        except RequestRefused as refusal:
            return Refused(command.request_id, refusal.reason, refusal.message)
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._prepare(request)
        return Reserved(request.request_id, request.num_found_blocks)

    def import_targets(self, command: ImportSlab) -> tuple[list[int], list[ExtentRef]]:
        """Return the blocks to write and their sources; raises ImportRefused if the request does not wait for them."""
        return import_targets(self._requests.get(command.request_id), command, self.pool.block_size)

    def mark_imported(self, command: ImportSlab, num_blocks: int, num_bytes: int) -> None:
        """Note that all blocks of a slab are imported; `num_blocks` of them were copied."""
        indices = range(command.first_block, command.first_block + len(command.extents))
        self._requests[command.request_id].imported_blocks.update((command.group, index) for index in indices)
        self._ledger.count("blocks_imported", num_blocks)
        self._ledger.count("bytes_imported", num_bytes)

    def start_decode(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Continue after the first token, which prefill sampled; compute here what was not imported.

        After `recompute` this saves sampling the first token again, unless it was sampled already. Changes nothing
        for a request that has started.
        """
        self._is_stalled = False
        request = self._requests.get(request_id)
        if request is None or request.mode != "decode" or request.num_tokens > request.num_initial_tokens:
            return
        request.token_ids.extend(token_ids)
        if reason := request.finish_reason_with((), self.config.context_length):
            self.abort(request_id)
            self._early_outputs.append(self._ledger.output(request, (), reason, is_last=True))
        elif request.state is RequestState.IMPORTING:
            self._begin_decoding(request)

    def recompute(self, request_id: str) -> None:
        """Compute the missing blocks of a decode request; does nothing once it has started."""
        self._is_stalled = False
        request = self._requests.get(request_id)
        if request is not None and request.state is RequestState.IMPORTING:
            self._begin_decoding(request)

    def abort(self, request_id: str) -> Request | None:
        """Forget a request in whatever state it is, free its blocks, and return it; None for an unknown id."""
        self._is_stalled = False
        self._early_outputs = [output for output in self._early_outputs if output.request_id != request_id]
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.state in (RequestState.WAITING, RequestState.PREEMPTED):
            self._waiting.remove(request)
        elif request.state is RequestState.RUNNING:
            self._running.remove(request)
        self._finish(request)
        return request

    def release_held(self, request_id: str) -> None:
        """Free a prefill request's blocks, now or once it is done; other requests are ignored."""
        self._is_stalled = False
        request = self._requests.get(request_id)
        if request is not None and request.state is RequestState.HELD:
            self._finish(request)
        elif request is not None and request.mode == "prefill":
            request.is_release_due = True

    # ---------------------------------------------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. A wait for blocks that only a command can free is not work."""
        return bool(self._early_outputs) or (bool(self._running or len(self._waiting)) and not self._is_stalled)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens: answers first, then prompts begun, then the queue; preempt where needed."""
        self.num_steps += 1
        batch = Batch(self.config, self._prepare)
        num_preempted = self._waiting.num_preempted
        self._schedule_running(batch)
        has_preempted = self._waiting.num_preempted > num_preempted
        if not has_preempted:  # else the preempted requests would be admitted again at once
            self._schedule_waiting(batch)
        batch.add_unready()
        self.speculator.draft(
            batch, self.config.num_blocks if self._waiting.num_preempted else self._running.num_growing
        )
        self._is_stalled = not batch.runs and not has_preempted
        self._ledger.scheduled(batch.runs)
        self._running.seat(batch.runs)
        return SchedulerOutput(self.num_steps, tuple(batch.runs.values()))

    def seal_written(self, output: SchedulerOutput) -> list[SealedBlocks]:
        """Return the blocks of prefills that this step completed; the next `update` does not return them again."""
        prefills = [run for run in output.runs if run.request.mode == "prefill"]
        return [event for run in prefills for event in seal(run.request, run.end, self._kv)]

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, Sequence[Sampled]]
    ) -> tuple[list[RequestOutput], list[SealedBlocks]]:
        """Update the requests of a step; `sampled` is the result of `Runner.execute`."""
        outputs, self._early_outputs = self._early_outputs, []
        sealed: list[SealedBlocks] = []
        self._ledger.count("steps")
        for run in output.runs:
            tokens = sampled[run.request.request_id] if run.samples else ()
            if run.request.mode == "prefill":
                self._take_computed(run)
                sealed += seal(run.request, run.end, self._kv)
                outputs += self._hand_over(run.request, tokens) if tokens else ()
            elif tokens:
                outputs.append(self._take_answer(run, tokens))
            else:
                self._take_computed(run)
        return outputs, sealed

    def count(self, name: str, amount: float = 1) -> None:
        """Add to one of the totals since start."""
        self._ledger.count(name, amount)

    def stats(self) -> EngineStats:
        """Return the current counts; requests whose blocks are being imported count as waiting."""
        return engine_stats(self._requests.values(), len(self._running), self.pool, self._ledger.counters)

    def _enqueue(self, request: Request) -> None:
        num_waiting = len(self._waiting) - self._waiting.num_preempted
        check_places(self.config.max_num_waiting, num_waiting, self._waiting.num_of_key(request.fairness_key), request)
        self._waiting.add(request, request.added_ns)

    def _reserve(self, request: Request) -> None:
        """Allocate blocks for the prompt and the first token of a decode request, or refuse it.

        One block per live request must be left, so that running requests can grow. While preempted requests wait for
        blocks, no new request overtakes them.
        """
        live = [other for other in self._requests.values() if other.mode != "prefill" and other.block_table]
        num_live, num_of_key = len(live), sum(other.fairness_key == request.fairness_key for other in live)
        check_places(self.config.max_num_seqs + self.config.max_num_waiting, num_live, num_of_key, request)
        num_tokens = min(request.num_tokens + 1, max_kv_tokens(request, self.config))
        if self._waiting.num_preempted or not self._kv.admit(request, num_tokens, request.num_tokens, num_live):
            raise kv_full(most_blocks(self.config, num_tokens), num_live, self._waiting.num_preempted, self._kv)
        request.state = RequestState.IMPORTING
        if not num_of_key:
            self._waiting.arrived(request, {other.fairness_key for other in live})
        self._ledger.found(request, request.num_computed_tokens)

    def _begin_decoding(self, request: Request) -> None:
        request.num_computed_tokens = num_ready_tokens(request, self.pool.block_size)
        self._kv.register_full_blocks(request)
        self._kv.drop_behind_window(request)
        if request.num_tokens_to_compute and self._kv.groups.can_compute(request):
            self._start_running(request)
        else:  # every prompt token is here and the last block may be shared, or the windows' blocks are incomplete
            self._queue_again(request, is_first=not self._waiting.num_preempted)

    def _schedule_running(self, batch: Batch) -> None:
        for request in self._running.in_order():
            if batch.is_full:
                return
            if request.state is RequestState.RUNNING and self._make_room(request, batch):
                batch.add(request)

    def _make_room(self, request: Request, batch: Batch) -> bool:
        """Grow a request to hold all its tokens, preempting the lowest ranks; False: it was preempted itself."""
        while not self._kv.grow(request, request.num_tokens):
            victim = self._running.victim()
            batch.remove(victim)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._ledger.preempted(request)
        self._running.remove(request)
        self._queue_again(request)

    def _queue_again(self, request: Request, *, is_first: bool = False) -> None:
        self._kv.free(request)
        request.state = RequestState.PREEMPTED
        if is_first and self._has_room(request):  # decodes need no free seat
            self._start_running(request)
        else:
            self._waiting.add(request, self._clock())

    def _has_room(self, request: Request) -> bool:
        return self._kv.admit(request, request.num_tokens, request.num_tokens - 1, self._running.num_growing)

    def _schedule_waiting(self, batch: Batch) -> None:
        """Admit requests strictly in the queue's order: a request that does not fit is not overtaken."""
        now_ns = self._clock() if len(self._waiting) else 0
        while batch.accepts_prompts and self._running.has_free_seat:
            request = self._waiting.peek(now_ns)
            if request is None or not self._has_room(request):
                return
            self._waiting.pop(now_ns)
            if request.mode != "decode":  # a decode's tokens were counted when it was added
                self._ledger.found(request, request.num_computed_tokens)
                self.prefixes.admit(request)
            if request.state is RequestState.WAITING:
                self._waiting.charge(request, request.num_tokens_to_compute)
            self._start_running(request)
            batch.add(request)

    def _start_running(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        self._running.add(request)

    def _take_computed(self, run: ScheduledRun) -> None:
        self._ledger.computed(run.request, run.first_position, run.num_tokens)
        run.request.num_computed_tokens = run.end
        self._keep_computed(run.request)

    def _keep_computed(self, request: Request) -> None:
        self.prefixes.register(request)
        self._kv.drop_behind_window(request)

    def _take_answer(self, run: ScheduledRun, tokens: Sequence[Sampled]) -> RequestOutput:
        request = run.request
        self.speculator.observe(run, len(tokens))
        output, reason = answers.take_tokens(run, tokens, self.config.context_length, self._ledger)
        self._waiting.charge(request, len(output.token_ids))
        self._keep_computed(request)
        if reason is not None:
            self._running.remove(request)
            self._finish(request)
        return output

    def _hand_over(self, request: Request, tokens: Sequence[Sampled]) -> list[RequestOutput]:
        """Hold the blocks of a finished prefill and return its first tokens, one per choice."""
        assert len(tokens) == len(request.choice_seeds), f"{request.request_id}: one token per choice is due"
        self._running.remove(request)
        if request.is_release_due:
            self._finish(request)
        else:
            request.state = RequestState.HELD
            self._kv.hold(request)
        self._waiting.charge(request, len(tokens))
        return answers.first_tokens(request, tokens, self.config.context_length, self._ledger)

    def _finish(self, request: Request) -> None:
        if request.state is RequestState.HELD:
            self._kv.release_held(request)
        else:
            self._kv.free(request)
        request.state = RequestState.FINISHED
        self.speculator.forget(request)
        del self._requests[request.request_id]
