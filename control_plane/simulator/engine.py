"""A simulated engine: prompts in chunks beside answers that advance together, one token each in every step.

Time moves from one change to the next, not from step to step. Between two changes the number of running answers is
constant and their contexts grow by one token a step, so `num_steps` steps take

    (step_ms + answer_ms * answers + context_ms * contexts + prompt part) * num_steps
        + context_ms * answers * num_steps ** 2 / 2

milliseconds. Steps are counted with fractions: a request that arrives within a step begins at once, where a real engine
waits for the step's end.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from control_plane.simulator.pool import Pool, Store
from control_plane.simulator.profiles import FleetProfile, WorkerProfile
from control_plane.simulator.traces import TraceRequest

_ALMOST = 1e-6
"""Of a step: less is rounding."""


@dataclass(eq=False)
class Job:
    """What one engine does for one request: computes its prompt, decodes its answer, or both."""

    request: TraceRequest
    computes_prompt: bool
    decodes: bool
    source: Store | None = None
    """Another host's store that prompt tokens may come from."""
    source_bytes_per_second: float = 1.0
    block_ids: tuple[int, ...] = ()
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    num_own: int = 0
    """Prompt tokens that were in the worker's pool."""
    num_host: int = 0
    num_remote: int = 0
    num_computed: int = 0
    num_preemptions: int = 0
    num_generated: int = 0
    num_waiting_tokens: int = 0
    """To compute, as its worker reports them while it waits."""
    private_tokens: float = 0.0
    """KV tokens that this job alone holds: the end of its prompt, and its answer."""
    started_step: float = 0.0
    sequence: int = 0

    @property
    def num_context(self) -> int:
        return self.request.num_prompt_tokens + self.num_generated

    @property
    def num_cached(self) -> int:
        return self.num_own + self.num_host + self.num_remote


@dataclass(frozen=True)
class Report:
    """What a worker tells gateways of itself."""

    number: int
    num_running: int
    num_waiting: int
    num_tokens_in_flight: int
    num_total_tokens: int
    num_used_tokens: int
    num_cached_tokens: int
    num_steps: float
    step_seconds: float
    num_computed: int
    num_generated: float


@dataclass
class _Batch:
    """Prompts that are computed together."""

    jobs: list[Job]
    num_tokens: int
    seconds: float
    """All their work, without the steps' own time."""
    part_left: float = 1.0
    num_steps: float = 1.0
    """Of the part that is left."""
    seconds_per_step: float = 0.0

    def cut(self, chunk_tokens: int) -> None:
        """Divide the part that is left into steps of `chunk_tokens`."""
        of_whole = max(1, math.ceil(self.num_tokens / chunk_tokens))
        self.num_steps = self.part_left * of_whole
        self.seconds_per_step = self.seconds / of_whole

    def advance(self, steps: float) -> None:
        self.part_left *= max(0.0, 1 - steps / self.num_steps)
        self.num_steps = max(0.0, self.num_steps - steps)


class Engine:
    """One worker. The simulation moves it to a time, changes it, and asks when it changes by itself."""

    def __init__(
        self,
        number: int,
        profile: WorkerProfile,
        fleet: FleetProfile,
        block_tokens: int,
        store: Store | None,
        on_prompt: Callable[[Engine, Job, float], None],
        on_end: Callable[[Engine, Job, float], None],
    ) -> None:
        """`on_prompt` is called when a prompt is computed, `on_end` when an answer is complete."""
        self.number = number
        self.profile = profile
        self.pool = Pool(profile.kv_tokens, block_tokens)
        self.version = 0
        """Grows with every change: an older prediction of the next change is void."""
        self._speed = 1.0
        self._fleet = fleet
        self._store = store
        self._on_prompt = on_prompt
        self._on_end = on_end
        self._now = 0.0
        self._step = 0.0
        self._waiting: deque[Job] = deque()
        self._num_waiting_tokens = 0
        self._ready: deque[Job] = deque()
        """Answers whose memory is here and that wait for a seat."""
        self._running: list[tuple[float, int, Job]] = []
        """A heap by the step of the last token."""
        self._contexts = 0.0
        self._batch: _Batch | None = None
        self._reserved: dict[int, Job] = {}
        self._num_jobs = 0
        self._step_seconds = 0.0
        self._num_computed = 0
        self._num_generated = 0.0

    # ------------------------------------------------------------------------------------------------------ arrivals

    def submit_prompt(self, job: Job, now: float) -> bool:
        """Queue a prompt; False if the queue is full or the prompt could never fit."""
        self.advance(now)
        num_needed = job.request.num_prompt_tokens + (job.request.num_output_tokens if job.decodes else 1)
        if len(self._waiting) >= self.profile.max_num_waiting or num_needed > self.profile.kv_tokens:
            return False
        job.block_ids = job.request.full_blocks
        self._waiting.append(job)
        self._count_waiting(job)
        self._changed()
        return True

    def reserve(self, job: Job, now: float) -> bool:
        """Take memory for a prompt that is computed elsewhere; False if there is none."""
        self.advance(now)
        job.block_ids = job.request.full_blocks
        tail = job.request.num_prompt_tokens - len(job.block_ids) * self.pool.block_tokens + 1
        num_live = len(self._running) + len(self._ready) + len(self._reserved)
        is_full = num_live >= self.profile.max_num_seqs + self.profile.max_num_waiting
        if is_full or not self.pool.has_room(job.block_ids, tail + 16 * num_live):  # 16: each may grow by a block
            return False
        job.num_own = self.pool.num_found(job.block_ids) * self.pool.block_tokens
        job.private_tokens = tail
        self.pool.take(job.block_ids, tail)
        self._reserved[id(job)] = job
        self._changed()
        return True

    def cancel(self, job: Job, now: float) -> None:
        """Give a reservation back."""
        self.advance(now)
        del self._reserved[id(job)]
        self.pool.release(job.block_ids, job.private_tokens)
        self._changed()

    def begin(self, job: Job, now: float) -> None:
        """The prompt's KV cache is here: decode from token two on."""
        self.advance(now)
        del self._reserved[id(job)]
        job.num_generated = 1
        self._seat(job, now)
        self._changed()

    # --------------------------------------------------------------------------------------------------- time passes

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._batch)

    def set_speed(self, speed: float, now: float) -> None:
        """Let the engine run at this share of its profile's speed from now on: others use its core."""
        if speed != self._speed:
            self.advance(now)
            self._speed = speed
            self.version += 1

    def next_change(self) -> float | None:
        """Return when something ends by itself; None while nothing runs."""
        steps = self._steps_to_change()
        return None if steps is None else self._now + self._seconds(steps) / self._speed

    def advance(self, now: float) -> None:
        """Let time pass; nothing ends within it."""
        elapsed, self._now = now - self._now, max(now, self._now)
        if elapsed <= 0 or not self.is_busy:
            return
        steps = self._steps_in(elapsed * self._speed)
        self._step += steps
        num_running = len(self._running)
        self._contexts += num_running * steps
        self._num_generated += num_running * steps
        self._step_seconds += elapsed
        self.pool.grow(num_running * steps)
        if self._batch is not None:
            self._batch.advance(steps)

    def num_generated(self, job: Job, now: float) -> float:
        """Return how many tokens of a job's answer there are."""
        self.advance(now)
        return job.num_generated + (self._step - job.started_step if job.sequence else 0.0)

    def change(self, now: float) -> None:
        """Do what is due now: answers and prompts end, and others take their place."""
        self.advance(now)
        while self._running and self._running[0][0] <= self._step + _ALMOST:
            _, _, job = heapq.heappop(self._running)
            self._contexts -= job.num_context + self._step - job.started_step
            self._end(job, now)
        if self._batch is not None and self._batch.num_steps <= _ALMOST:
            jobs, self._batch = self._batch.jobs, None
            for job in jobs:
                self._prompt_done(job, now)
        while self.pool.num_available < 0 and len(self._running) > 1:
            self._preempt()
        self._changed()

    def report(self, now: float) -> Report:
        self.advance(now)
        in_batch = [] if self._batch is None else self._batch.jobs
        computing = 0.0 if self._batch is None else self._batch.part_left * self._batch.num_tokens
        if self.profile.reports_cached_tokens:
            computing = sum(job.num_context for job in in_batch)
        contexts = self._contexts + sum(job.num_context for job in (*self._ready, *self._reserved.values()))
        return Report(
            self.number,
            len(self._running) + len(in_batch),
            len(self._waiting) + len(self._ready) + len(self._reserved),
            round(self._num_waiting_tokens + computing + contexts),
            self.pool.num_tokens,
            round(self.pool.num_used),
            self.pool.num_cached,
            self._step,
            self._step_seconds,
            self._num_computed,
            self._num_generated,
        )

    # ------------------------------------------------------------------------------------------------------ the steps

    def _rate(self) -> tuple[float, float]:
        """Return seconds per step now, and what each further step adds to that."""
        profile, num_running = self.profile, len(self._running)
        ms = profile.step_ms + profile.answer_ms * num_running + profile.context_ms * self._contexts
        prompt_seconds = self._batch.seconds_per_step if self._batch is not None else 0.0
        return ms / 1000 + prompt_seconds, profile.context_ms * num_running / 1000

    def _seconds(self, steps: float) -> float:
        first, growth = self._rate()
        return first * steps + growth * steps * steps / 2

    def _steps_in(self, seconds: float) -> float:
        first, growth = self._rate()
        if growth <= 0:
            return seconds / first
        return 2 * seconds / (first + math.sqrt(first * first + 2 * growth * seconds))

    def _steps_to_change(self) -> float | None:
        steps = []
        if self._running:
            steps.append(self._running[0][0] - self._step)
            if len(self._running) > 1:
                steps.append(self.pool.num_available / len(self._running) + _ALMOST)
        if self._batch is not None:
            steps.append(self._batch.num_steps)
        return max(0.0, min(steps)) if steps else None

    # ---------------------------------------------------------------------------------------------------- life cycle

    def _changed(self) -> None:
        while self._ready and len(self._running) < self.profile.max_num_seqs:
            self._run(self._ready.popleft())
        if self._batch is None and self._waiting:
            self._begin_batch()
        if self._batch is not None:
            self._batch.cut(self._chunk_tokens)
        self.version += 1

    @property
    def _chunk_tokens(self) -> int:
        return self.profile.chunk_tokens_with_answers if self._running else self.profile.chunk_tokens

    def _begin_batch(self) -> None:
        """Take the first prompt, and those behind it that fit into its step; with an answer here it needs a seat."""
        jobs: list[Job] = []
        num_tokens, seconds = 0, 0.0
        num_seats = self.profile.max_num_seqs - len(self._running) - len(self._ready)
        while self._waiting:
            job = self._waiting[0]
            if job.decodes and len(jobs) >= num_seats:
                break
            num_cached = self.pool.num_found(job.block_ids) * self.pool.block_tokens
            if jobs and num_tokens + job.num_context - num_cached > self._chunk_tokens:
                break
            if (took := self._schedule(job)) is None:
                break
            self._waiting.popleft()
            self._num_waiting_tokens -= job.num_waiting_tokens
            jobs.append(job)
            num_tokens, seconds = num_tokens + took[0], seconds + took[1]
        if jobs:
            self._batch = _Batch(jobs, num_tokens, seconds)

    def _schedule(self, job: Job) -> tuple[int, float] | None:
        """Give a prompt its memory; return the tokens to compute and their seconds, None without memory."""
        size = self.pool.block_tokens
        tail = job.num_context - len(job.block_ids) * size + 1
        if not self.pool.has_room(job.block_ids, tail):
            return None
        most = (job.num_context - 1) // size  # the last token is always computed
        own = min(most, self.pool.num_found(job.block_ids))
        host, remote, load_seconds = self._loaded(job, own, most)
        if not job.num_preemptions:  # else the prompt was counted before
            job.scheduled_at = self._now
            job.num_own, job.num_host, job.num_remote = own * size, host * size, remote * size
        num_computed = job.num_context - (own + host + remote) * size
        job.num_computed += num_computed
        job.private_tokens = tail
        self.pool.take(job.block_ids, tail)
        return num_computed, load_seconds + self.profile.prompt_seconds(num_computed, job.num_context - num_computed)

    def _loaded(self, job: Job, own: int, most: int) -> tuple[int, int, float]:
        """Return the blocks that stores have after those of the pool, and the seconds to get them."""
        num_bytes = self.pool.block_tokens * self.profile.bytes_per_token
        host = remote = 0
        seconds = 0.0
        if self._store is not None:
            host = min(most - own, self._store.num_found(job.block_ids, own))
            seconds = host * num_bytes / self._fleet.store_bytes_per_second
        if job.source is not None and job.source is not self._store:
            remote = min(most - own - host, job.source.num_found(job.block_ids, own + host))
            seconds += remote * num_bytes / job.source_bytes_per_second + (self._fleet.link_seconds if remote else 0)
        return host, remote, seconds

    def _prompt_done(self, job: Job, now: float) -> None:
        self._num_computed += job.request.num_prompt_tokens - job.num_cached if not job.num_preemptions else 0
        if self._store is not None:
            self._store.put(job.block_ids)
        if job.num_preemptions:
            self._seat(job, now)
            return
        job.first_token_at = now
        job.num_generated = 1
        if job.decodes:
            self._on_prompt(self, job, now)
            self._seat(job, now)
        else:
            self.pool.release(job.block_ids, job.private_tokens)
            self._on_prompt(self, job, now)

    def _seat(self, job: Job, now: float) -> None:
        """Let an answer run, or wait for a seat, or end if it has one token."""
        if job.num_generated >= job.request.num_output_tokens:
            self._end(job, now)
        elif len(self._running) < self.profile.max_num_seqs:
            self._run(job)
        else:
            self._ready.append(job)

    def _run(self, job: Job) -> None:
        job.started_step = self._step
        self._num_jobs += 1
        job.sequence = self._num_jobs
        self._contexts += job.num_context
        last = self._step + job.request.num_output_tokens - job.num_generated
        heapq.heappush(self._running, (last, job.sequence, job))

    def _end(self, job: Job, now: float) -> None:
        if job.sequence:
            job.private_tokens += self._step - job.started_step
        self.pool.release(job.block_ids, job.private_tokens)
        self._on_end(self, job, now)

    def _preempt(self) -> None:
        """Take the memory of the answer that began last; its context is computed again, before other prompts."""
        last, sequence, job = max(self._running, key=lambda each: each[1])
        self._running.remove((last, sequence, job))
        heapq.heapify(self._running)
        num_steps = self._step - job.started_step
        self._contexts -= job.num_context + num_steps
        self.pool.release(job.block_ids, job.private_tokens + num_steps)
        job.num_generated += int(num_steps)
        job.num_preemptions += 1
        job.private_tokens = 0.0
        job.sequence = 0
        job.started_step = 0.0
        self._waiting.appendleft(job)
        self._count_waiting(job)

    def _count_waiting(self, job: Job) -> None:
        num_cached = 0 if self.profile.reports_cached_tokens else self.pool.num_found(job.block_ids)
        job.num_waiting_tokens = job.num_context - num_cached * self.pool.block_tokens
        self._num_waiting_tokens += job.num_waiting_tokens
