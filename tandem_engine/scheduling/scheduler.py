"""Chooses the tokens of each step, and updates requests with the step's results.

`RequestState` shows the life of a request. Its blocks:

    aggregated, prefill   allocated for all known tokens when it leaves the queue; leading blocks from the prefix cache
    decode                allocated, or refused, when it is added; with all its blocks it waits for a seat only
    answers               one more block whenever the last is full. If no block is free, the running request of the
                          lowest rank is preempted, never a prefill. Importing and held requests keep their blocks.

At most `max_num_seqs` requests have a seat. A free seat goes to the first of those that have their blocks, or to the
first of the queue, by class, age and fairness alike (`WaitingQueue`). An answer that has its blocks also takes the seat
of an answer of a lower class, which waits with its blocks.

A decode request that is refused is offered again, and has a turn like those that wait here: `RefusedHandOvers`. Until
then it takes no block that the queue's head needs, if that is of its class or a higher one, or has waited too long.
While a head that has waited too long does not fit, no decode request is accepted.

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
    Refused,
    RequestOutput,
    Reserved,
    SealedBlocks,
)
from tandem_engine.scheduling import answers
from tandem_engine.scheduling.admission import RequestRefused, build_request, check_places, kv_full, max_kv_tokens
from tandem_engine.scheduling.batch import Batch, ScheduledRun, SchedulerOutput
from tandem_engine.scheduling.block_pool import BlockPool
from tandem_engine.scheduling.copy_budget import CopyBudget
from tandem_engine.scheduling.hand_over import (
    first_whole_block,
    num_ready_tokens,
    seal,
)
from tandem_engine.scheduling.kv_cache_manager import KVCacheManager
from tandem_engine.scheduling.ledger import Ledger, engine_stats
from tandem_engine.scheduling.prefix import Load, PrefixExchange
from tandem_engine.scheduling.refused_hand_overs import RefusedHandOver, RefusedHandOvers
from tandem_engine.scheduling.request import Request, RequestState, Sampled
from tandem_engine.scheduling.running import RunningRequests
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.scheduling.shares import ClassShares
from tandem_engine.scheduling.slab_importer import PoolMemory, SlabImporter
from tandem_engine.scheduling.speculation.speculator import Speculator
from tandem_engine.scheduling.waiting_queue import WaitingQueue
from tandem_engine.scheduling.window_groups import most_blocks

__all__ = ["ScheduledRun", "Scheduler", "SchedulerOutput"]


class Scheduler:
    """Owns every request and every block. `schedule` and `update` alternate.

    Commands come between `update` and `schedule`, or while the step runs if they are about requests that are not in it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        generations: MutableSequence[int] | None = None,
        clock: Callable[[], int] = time.time_ns,
        load: Load = lambda blocks, extents: 0,
        prepare: Callable[[Request], bool] = lambda request: True,
        monotonic: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`clock` returns Unix nanoseconds, for reports; waits are measured by `monotonic`, which nobody sets."""
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size, generations)
        self._kv = KVCacheManager(self.pool, config)
        self._clock = clock
        self._monotonic = monotonic
        self._prepare = prepare
        self._ledger = Ledger(clock)
        self.copy_budget = CopyBudget(monotonic)
        self.prefixes = PrefixExchange(self._kv, self._ledger, load, self.copy_budget)
        self.speculator = Speculator(config, self._kv)
        self._requests: dict[str, Request] = {}
        self._shares = ClassShares()
        self._waiting = WaitingQueue(self._shares)
        self._ready = WaitingQueue(self._shares, waits_for_blocks=False)
        self._running = RunningRequests(config.max_num_seqs)
        self._refused = RefusedHandOvers(config)
        self._early_outputs: list[RequestOutput] = []  # of requests that ended before they ran
        self.num_steps = self._num_arrivals = 0
        self._is_stalled = False
        self._held_for: RefusedHandOver | None = None  # the queue's head leaves its blocks to this hand-over
        self._has_planned = False
        self._planned: dict[Request, int] = {}  # answers that have room for so many tokens in the next step

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

    def importer(self, memory: PoolMemory) -> SlabImporter:
        """Return what copies slabs into the blocks of these requests; there is one."""
        return SlabImporter(self._requests, memory, self._ledger, self.copy_budget, self.pool.block_size)

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
        elif request.state in (RequestState.READY, RequestState.RUNNING):
            self._unseat(request)
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
        has_requests = bool(self._running or self._ready or self._waiting)
        return bool(self._early_outputs) or (has_requests and (not self._is_stalled or self._has_hold_ended))

    @property
    def is_held(self) -> bool:
        """Whether `has_work` may become true without a command, because a hand-over is not offered again."""
        return self._is_stalled and self._held_for is not None

    def plan_ahead(self, output: SchedulerOutput) -> None:
        """Do what can be done for the next step while `output` runs: give blocks to its answers, load a prefix.

        Answers that get exactly one token and may go on grow by free blocks alone. Nothing is preempted, evicted or
        admitted: `schedule` does that, and drops the plans of requests that ended or failed.
        """
        self._has_planned = True
        self.prefixes.go_on()
        for run in output.runs:
            num_tokens = run.end + 1
            if run.samples and not run.draft_tokens and run.request.mode != "prefill":
                may_go_on = num_tokens <= max_kv_tokens(run.request, self.config)
                if may_go_on and self._kv.grow_ahead(run.request, num_tokens):
                    self._planned[run.request] = num_tokens

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens: answers first, then prompts begun, then the queue; preempt where needed."""
        self.num_steps += 1
        batch = Batch(self.config, self._prepare)
        num_preempted = self._waiting.num_preempted
        now_ns = self._monotonic() if self._waiting or self._ready else 0
        self._held_for = None
        if not self._has_planned:
            self.prefixes.go_on()
        self._seat_ready(now_ns)
        self._schedule_running(batch)
        has_preempted = self._waiting.num_preempted > num_preempted
        if not has_preempted:  # else the preempted requests would be admitted again at once
            self._schedule_waiting(batch, now_ns)
        batch.add_unready()
        self.speculator.draft(batch, self.config.num_blocks if self._waiting.num_preempted else self._num_growing)
        self._is_stalled = not batch.runs and not has_preempted and not self.prefixes.is_loading
        self._has_planned = False
        self._planned.clear()
        self._ledger.scheduled(batch.runs)
        return SchedulerOutput(self.num_steps, tuple(batch.runs.values()))

    def seal_written(self, output: SchedulerOutput) -> list[SealedBlocks]:
        """Return the blocks of prefills that this step completed; the next `update` does not return them again."""
        prefills = [run for run in output.runs if run.request.mode == "prefill"]
        return [event for run in prefills for event in seal(run.request, run.end, self._kv)]

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, Sequence[Sampled]]
    ) -> tuple[list[RequestOutput], list[SealedBlocks]]:
        """Update the requests of a step; `sampled` is the result of `Runner.collect`."""
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

    def record_step(self, output: SchedulerOutput, seconds: float) -> None:
        """Count the time of a step; keep the longest of those with an answer."""
        self._ledger.count("step_seconds", seconds)
        if any(run.is_answer for run in output.runs):
            self._ledger.record_longest("longest_answer_step_seconds", seconds)

    def stats(self) -> EngineStats:
        """Return the current counts; requests whose blocks are being imported count as waiting."""
        num_running = len(self._running) + len(self._ready)
        self._ledger.record_longest("longest_copy_seconds", self.copy_budget.longest_copies_ns / 1e9)
        self._ledger.record_longest("longest_copy_cpu_seconds", self.copy_budget.longest_copies_cpu_ns / 1e9)
        self._ledger.record_longest("longest_commands_seconds", self.copy_budget.longest_commands_ns / 1e9)
        return engine_stats(self._requests.values(), num_running, self.pool, self._ledger.counters)

    def _enqueue(self, request: Request) -> None:
        num_waiting = len(self._waiting) - self._waiting.num_preempted
        check_places(self.config.max_num_waiting, num_waiting, self._waiting.num_of_key(request.fairness_key), request)
        self._waiting.add(request, self._monotonic())

    def _reserve(self, request: Request) -> None:
        """Allocate blocks for the prompt and the first token of a decode request, or refuse it.

        One block per live request must be left, so that running requests can grow. While preempted requests wait for
        blocks, no new request overtakes them unless its turn has come.
        """
        live = [other for other in self._requests.values() if other.mode != "prefill" and other.block_table]
        num_live, num_of_key = len(live), sum(other.fairness_key == request.fairness_key for other in live)
        check_places(self.config.max_num_seqs + self.config.max_num_waiting, num_live, num_of_key, request)
        num_tokens = min(request.num_tokens + 1, max_kv_tokens(request, self.config))
        now_ns = self._monotonic()
        self._refused.offered(request, now_ns)
        num_blocks, num_kept = most_blocks(self.config, num_tokens), self._num_kept_from(request, now_ns)
        is_overtaking = self._waiting.num_preempted > 0 and not self._refused.is_due(request, now_ns)
        if is_overtaking or not self._kv.admit(request, num_tokens, request.num_tokens, num_live, num_kept):
            self._refused.refused(request, num_blocks, now_ns)
            raise kv_full(num_blocks, num_live, self._waiting.num_preempted, num_kept, self._kv)
        if self._refused.is_due(request, now_ns):  # it took its class's turn: it is not preempted at once
            request.effective_priority = max(request.effective_priority, self._shares.highest)
        self._refused.accepted(request)
        request.state = RequestState.IMPORTING
        if not num_of_key:
            others = {other.fairness_key for other in live}
            self._shares.of(request.priority).arrive(request.fairness_key, others)
        self._ledger.found(request, request.num_computed_tokens)

    def _begin_decoding(self, request: Request) -> None:
        window = self._kv.groups.window
        request.num_computed_tokens = num_ready_tokens(request, self.pool.block_size, window)
        request.first_whole_block = first_whole_block(request, self.pool.block_size, window)
        self._kv.register_full_blocks(request)
        self._kv.drop_behind_window(request)
        if request.num_tokens_to_compute and self._kv.groups.can_compute(request):
            self._wait_for_seat(request)
        else:  # every prompt token is here and the last block may be shared, or the windows' blocks are incomplete
            self._queue_again(request, is_first=not self._waiting.num_preempted)

    def _schedule_running(self, batch: Batch) -> None:
        for request in self._running.in_order():
            if batch.is_full:
                return
            is_loading = self.prefixes.num_loading_tokens(request) > 0
            if not is_loading and request.state is RequestState.RUNNING and self._make_room(request, batch):
                batch.add(request)

    def _make_room(self, request: Request, batch: Batch) -> bool:
        """Grow a request to hold all its tokens, preempting the lowest ranks; False: it was preempted itself."""
        if self._planned.get(request) == request.num_tokens:
            return True
        while not self._kv.grow(request, request.num_tokens):
            victim = self._victim()
            batch.remove(victim)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _victim(self) -> Request:
        """Return the request to preempt: the lowest rank, but never a prefill, because others pull from its blocks.

        So the earliest request of the highest class always continues, and each request becomes that one in time.
        """
        having: list[Request] = [each for each in (*self._running, *self._ready) if each.mode != "prefill"]
        return max(having, key=lambda each: each.rank)

    def _preempt(self, request: Request) -> None:
        self._ledger.preempted(request)
        self._unseat(request)
        self._queue_again(request)

    def _queue_again(self, request: Request, *, is_first: bool = False) -> None:
        self._kv.free(request)
        request.state = RequestState.PREEMPTED
        if is_first and self._has_room(request):
            self._wait_for_seat(request)
        else:
            self._waiting.add(request, self._monotonic())

    def _num_kept_from(self, request: Request, now_ns: int) -> int:
        """Count the blocks that a hand-over leaves to those whose turn is before its own."""
        due, head, standing = self._refused.due(now_ns), self._waiting.peek(now_ns), self._waiting.standing(now_ns)
        is_due = due is not None and self._refused.is_due(request, now_ns)
        num_kept = 0
        if head is not None and standing is not None:
            is_head_due = standing.is_before(due.since_ns) if due is not None and is_due else not standing.is_early
            if is_head_due and not self._kv.fits(head, head.num_tokens, head.num_tokens - 1, self._num_growing):
                return self.pool.num_blocks  # running requests grow: no other count holds until the head fits
            if is_head_due or (not is_due and head.effective_priority >= request.priority):
                num_kept += self._num_kept_for(most_blocks(self.config, head.num_tokens))
        if due is not None:  # one choice leaves the blocks of the others
            num_missing = self._refused.num_missing_blocks(due)
            num_kept += num_missing - due.num_blocks_each if is_due else self._num_kept_for(num_missing)
        return num_kept

    def _num_kept_from_queue(self, now_ns: int) -> int:
        """Count the blocks that the queue's head leaves to a refused hand-over whose turn is before its own."""
        due, standing = self._refused.due(now_ns), self._waiting.standing(now_ns)
        self._held_for = None if standing is None or (due and standing.is_before(due.since_ns)) else due
        return self._num_kept_for(self._refused.num_missing_blocks(self._held_for)) if self._held_for is not None else 0

    def _num_kept_for(self, num_blocks: int) -> int:
        """Add the blocks into which all grow in the next step, a request that is admitted meanwhile included."""
        return num_blocks + (self._num_growing + 1) * (1 + (self.config.num_window_groups or 0))

    @property
    def _has_hold_ended(self) -> bool:
        return self._held_for is not None and self._refused.due(self._monotonic()) is not self._held_for

    def _has_room(self, request: Request, num_kept: int = 0) -> bool:
        return self._kv.admit(request, request.num_tokens, request.num_tokens - 1, self._num_growing, num_kept)

    @property
    def _num_growing(self) -> int:
        return self._running.num_growing + len(self._ready)

    def _seat_ready(self, now_ns: int) -> None:
        """Give seats to requests that have their blocks; keep a free seat for the queue's head if that goes first."""
        while (request := self._ready.peek(now_ns)) is not None:
            num_seats = self._running.num_free_seats
            if num_seats == 0 or (num_seats == 1 and self._is_queue_first(now_ns)):
                last = self._running.last_answer()
                if last is None or last.effective_priority >= request.effective_priority:
                    return
                self._unseat(last)
                self._wait_for_seat(last, is_first=True)
            self._ready.pop(now_ns)
            self._start_running(request)

    def _is_queue_first(self, now_ns: int) -> bool:
        """Whether the queue's head fits, and goes before the first request that has its blocks already."""
        head, of_head, of_ready = (
            self._waiting.peek(now_ns),
            self._waiting.standing(now_ns),
            self._ready.standing(now_ns),
        )
        if head is None or of_head is None or of_ready is None or of_head > of_ready:
            return False
        num_kept = self._num_kept_from_queue(now_ns)
        return self._kv.fits(head, head.num_tokens, head.num_tokens - 1, self._num_growing, num_kept)

    def _schedule_waiting(self, batch: Batch, now_ns: int) -> None:
        """Admit requests strictly in the queue's order: a request that does not fit is not overtaken.

        While a request loads its prefix, the others wait: they may find it in the pool then.
        """
        while batch.accepts_prompts and self._running.num_free_seats > 0 and not self.prefixes.is_loading:
            request = self._waiting.peek(now_ns)
            if request is None or not self._has_room(request, self._num_kept_from_queue(now_ns)):
                return
            self._waiting.pop(now_ns)
            if request.mode != "decode":  # a decode's tokens were counted when it was added
                self._ledger.found(request, request.num_computed_tokens)
                self.prefixes.admit(request)
            num_loading_tokens = self.prefixes.num_loading_tokens(request)
            if request.state is RequestState.WAITING:
                self._shares.charge(request, request.num_tokens_to_compute - num_loading_tokens)
            self._start_running(request)
            if not num_loading_tokens:
                batch.add(request)

    def _start_running(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        self._running.add(request)

    def _wait_for_seat(self, request: Request, *, is_first: bool = False) -> None:
        request.state = RequestState.READY
        self._ready.add(request, self._monotonic(), is_first=is_first)

    def _unseat(self, request: Request) -> None:
        self.prefixes.cancel(request)
        if request.state is RequestState.READY:
            self._ready.remove(request)
        else:
            self._running.remove(request)

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
        self._shares.charge(request, len(output.token_ids))
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
            self._kv.mark_ends(request)
            self._kv.hold(request)
        self._shares.charge(request, len(tokens))
        return answers.first_tokens(request, tokens, self.config.context_length, self._ledger)

    def _finish(self, request: Request) -> None:
        if request.state is RequestState.HELD:
            self._kv.release_held(request)
        else:
            self._kv.mark_ends(request)
            self._kv.free(request)
        request.state = RequestState.FINISHED
        self.speculator.forget(request)
        del self._requests[request.request_id]
