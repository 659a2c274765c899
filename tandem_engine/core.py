"""Runs the steps of the engine, and carries out commands between them, or while a step runs.

Without overlap a step is one call: schedule, launch, collect, update. With overlap a step runs while this thread
carries out commands and plans the next step:

    this thread    | launch n | StepDone n-1, commands, plan n+1 | collect n, update, schedule, launch n+1 | StepDone n
    runner                    | step n                           |                                         | step n+1

Commands about a request of the running step wait for its end, so nobody touches a block that the step writes.

This module does not import torch; `Runner` computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial
from threading import current_thread
from typing import NamedTuple, Protocol

from tandem_engine.errors import CorruptBlock, RegionError
from tandem_engine.messages import (
    AbortRequest,
    AddRequest,
    BlocksSealed,
    Command,
    EngineEvent,
    ExtentRef,
    ImportSlab,
    MapRegion,
    Ping,
    Pong,
    PoolPoints,
    Recompute,
    ReleaseHeld,
    ReleaseSlabs,
    RequestAborted,
    RequestFailed,
    RequestOutput,
    StartDecode,
    StepDone,
    UnmapRegion,
)
from tandem_engine.publisher import PoolPublisher, Publisher
from tandem_engine.scheduling.request import Request, Sampled
from tandem_engine.scheduling.scheduler import Scheduler, SchedulerOutput
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.scheduling.slab_importer import PoolMemory

log = logging.getLogger(__name__)


class RequestsFailed(Exception):
    """A step failed because of these requests; the others have lost nothing and run again in the next step."""

    def __init__(
        self,
        request_ids: Collection[str],
        message: str,
        *,
        is_callers_fault: bool = False,
        messages: Mapping[str, str] | None = None,
    ) -> None:
        """`messages` has those that differ from `message`, by request id."""
        super().__init__(message)
        self.request_ids = tuple(request_ids)
        self.message = message
        self.is_callers_fault = is_callers_fault
        self._messages = messages or {}

    def message_of(self, request_id: str) -> str:
        return self._messages.get(request_id, self.message)


class Ticket(Protocol):
    """A step that was launched."""

    @property
    def is_running(self) -> bool:
        """Whether `collect` would wait, and `Runner.wake_fd` will tell when it no longer would."""
        ...


class Runner(PoolMemory, Protocol):
    """Owns the model and the KV tensors; reads requests and never changes them."""

    @property
    def wake_fd(self) -> int | None:
        """An eventfd that is written when a step ends or has written its KV; None: this runner has no thread."""
        ...

    @property
    def generations(self) -> MutableSequence[int]:
        """One per slot, written by the block pool; shared memory where other processes read the pool."""
        ...

    def prepare(self, request: Request) -> bool:
        """Start what the request's first token needs besides its prompt; return whether all of it is ready."""
        ...

    def launch(self, output: SchedulerOutput, kv_written: Callable[[], None] = lambda: None) -> Ticket:
        """Start to compute all runs; `collect` follows before the next launch.

        Calls `kv_written` at most once, as soon as other processes may read the keys and values of all runs, perhaps on
        another thread. Raises RequestsFailed if only some requests caused the failure; any other exception ends the
        engine.
        """
        ...

    def collect(self, ticket: Ticket) -> Mapping[str, Sequence[Sampled]]:
        """Wait for the runs; return, by request id, one token per choice seed for each run that samples.

        For a run with drafts: the drafts that equal the token sampled at their position, up to the first that does
        not, and the token sampled there. Raises what `launch` raises.
        """
        ...

    def checksums(self, slots: Sequence[int]) -> list[int]:
        """Return the checksums of slots of the region that others read; empty if this engine computes none."""
        ...

    def map_region(self, command: MapRegion, *fds: int) -> None:
        """Map a region read-only, of which `fds` are the descriptors; the caller closes them."""
        ...

    def unmap_region(self, region_id: str) -> None: ...

    def close(self) -> None:
        """End the runner's threads, if it has any, after the step that runs."""
        ...


@dataclass(slots=True)
class _Flight:
    """A step between its launch and its end."""

    output: SchedulerOutput
    started_ns: int
    ticket: Ticket | None = None
    """None: nothing runs."""
    failure: RequestsFailed | None = None
    is_written: bool = False
    """Set when others may read the KV of all runs, perhaps by another thread."""
    is_sealed: bool = False
    is_planned: bool = False
    is_collected: bool = False
    """The step before is reported, so what this step seals may be."""
    _request_ids: frozenset[str] | None = None

    @property
    def request_ids(self) -> frozenset[str]:
        if self._request_ids is None:
            self._request_ids = frozenset(run.request.request_id for run in self.output.runs)
        return self._request_ids


class _Result(NamedTuple):
    """What a step did, without blocks and statistics."""

    step: int
    outputs: list[RequestOutput]
    admitted: list[str]
    points: PoolPoints | None
    """Taken before the next step begins, which may evict what this one has stored."""


class EngineCore:
    """Joins scheduler and runner. For one thread: `handle` any number of commands, then `step` while `has_work`."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        clock: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], int] = time.monotonic_ns,
        publisher: Publisher | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        """The clocks return nanoseconds: `clock` since 1970, for reports; `monotonic` for waits.

        Without a `publisher`, others read the pool, and its region has no name. With `overlaps`, `run_step` returns
        while a step runs, and the next step is planned meanwhile.
        """
        self.runner = runner
        self.publisher = publisher or PoolPublisher("", runner.checksums)
        self._overlaps = overlaps
        self._flight: _Flight | None = None
        self._deferred: list[Command] = []
        self.scheduler = Scheduler(config, runner.generations, clock, self._load, runner.prepare, monotonic)
        self._monotonic = monotonic
        self._failures: list[RequestFailed] = []
        self._importer = self.scheduler.importer(runner)

    def has_work(self) -> bool:
        """Whether a step runs, or `step` would do anything before the next command."""
        return self._flight is not None or self.scheduler.has_work or self.publisher.is_copying

    def is_held(self) -> bool:
        """Whether `has_work` may become true without a command: look again soon."""
        return self._flight is None and self.scheduler.is_held

    def wake_fd(self) -> int | None:
        """Return the eventfd to wait for before the next `run_step`; None: `run_step` has something to do now."""
        flight = self._flight
        if flight is None or not flight.is_planned or flight.ticket is None or not flight.ticket.is_running:
            return None
        return None if flight.is_written and not flight.is_sealed else self.runner.wake_fd

    def step(self, emit: Callable[[EngineEvent], None] | None = None) -> StepDone:
        """Run one step to its end; `take_failures` returns the requests that failed in it.

        Calls `emit` during the step with events that are ready before its end.
        """
        flight = self._launch(emit)
        if self._overlaps:
            self._plan_ahead(flight)
            self._seal_early(flight, emit)
        return self._done(self._end(flight))

    def run_step(self, emit: Callable[[EngineEvent], None]) -> None:
        """Run one step and emit its events, those of requests that failed in it included.

        With overlap: launch a step, or do what can be done while it runs; once it has ended, launch the next one, and
        then emit the events of the one that ended.
        """
        if not self._overlaps:
            emit(self.step(emit))
            self._emit_all(emit, self.take_failures())
        elif (flight := self._flight) is None:
            self._flight = self._launch(emit)
        elif not self._goes_on(flight, emit):
            result, self._flight = self._end(flight), None
            events: list[EngineEvent] = [*self.take_failures()]
            deferred, self._deferred = self._deferred, []
            for command in deferred:
                events += self.handle(command)
            if self.scheduler.has_work:
                self._flight = self._launch(emit)
            self._emit_all(emit, [self._done(result), *events])

    def close(self) -> None:
        """Wait for the step that runs, if one does, and end the runner's threads."""
        self.runner.close()

    def begin_turn(self) -> None:
        """Prepare for the commands between two steps; commands while a step runs share the budget of that step."""
        if self._flight is None:
            self.renew_copy_budget()

    def renew_copy_budget(self) -> None:
        """Let commands and copies take their time again; a step does so at its end."""
        self.scheduler.copy_budget.renew()

    def take_failures(self) -> list[RequestFailed]:
        """Return, once, the requests that failed since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def handle(self, command: Command, *fds: int) -> list[EngineEvent]:
        """Carry out a command between two steps and return its immediate events; `fds` come with MapRegion."""
        while (events := self.handle_some(command, *fds)) is None:
            self.renew_copy_budget()
        return events

    def handle_some(self, command: Command, *fds: int) -> list[EngineEvent] | None:
        """Do the same within the copy budget. None: handle the same command again before any other, after a step.

        A command about a request of the running step, and all about that request that follow, are carried out when the
        step has ended; `run_step` emits their events.
        """
        if self._is_about_running(command):
            self._deferred.append(command)
            return []
        with self.scheduler.copy_budget.command():
            return self._carry_out(command, fds)

    def _carry_out(self, command: Command, fds: Sequence[int]) -> list[EngineEvent] | None:
        match command:
            case AddRequest():
                return [self.scheduler.add(command)]
            case ImportSlab():
                imported = self._importer.import_some(command)
                return [imported] if imported is not None else None
            case StartDecode(request_id, token_ids):
                self.scheduler.start_decode(request_id, token_ids)
            case Recompute(request_id):
                self.scheduler.recompute(request_id)
            case AbortRequest(request_id):
                self.publisher.forget(request_id)
                return [self._aborted(request_id, self.scheduler.abort(request_id)), self._stats_only()]
            case ReleaseHeld(request_id):
                self.publisher.forget(request_id)
                self.scheduler.release_held(request_id)
                return [self._stats_only()]
            case ReleaseSlabs(request_id, num_blocks):
                self.publisher.release(request_id, num_blocks)
                return [self._stats_only()]
            case MapRegion():
                assert fds, "a region's descriptors come with MapRegion"
                self._map_region(command, fds)
            case UnmapRegion(region_id):
                self.runner.unmap_region(region_id)
            case Ping():
                return [Pong()]
        return []  # Shutdown too: the process around the core handles it

    def _is_about_running(self, command: Command) -> bool:
        request_id = getattr(command, "request_id", None)
        return self._flight is not None and request_id is not None and request_id in self._flight.request_ids

    def _launch(self, emit: Callable[[EngineEvent], None] | None) -> _Flight:
        """Schedule a step and start it."""
        started_ns = self._monotonic()
        flight = _Flight(self.scheduler.schedule(), started_ns)

        def kv_written() -> None:
            flight.is_written = True
            if not self._overlaps or (flight.is_collected and current_thread() is engine_thread):
                self._seal_early(flight, emit)

        engine_thread = current_thread()

        if not flight.output.runs:
            self.publisher.wait()
        else:
            try:
                flight.ticket = self.runner.launch(flight.output, kv_written)
            except RequestsFailed as failure:
                flight.failure = failure
        return flight

    def _goes_on(self, flight: _Flight, emit: Callable[[EngineEvent], None]) -> bool:
        """Do what can be done while a step runs; return whether it still runs."""
        self._seal_early(flight, emit)
        if not flight.is_planned:
            self._plan_ahead(flight)
        return flight.ticket is not None and flight.ticket.is_running

    def _plan_ahead(self, flight: _Flight) -> None:
        flight.is_planned = True
        if flight.ticket is not None:
            self.scheduler.plan_ahead(flight.output)

    def _seal_early(self, flight: _Flight, emit: Callable[[EngineEvent], None] | None) -> None:
        """Emit, once, the blocks that a step has written and others may read before its end."""
        if emit is None or flight.is_sealed or not flight.is_written:
            return
        flight.is_sealed = True
        if sealed := self.scheduler.seal_written(flight.output):
            self.publisher.publish(sealed, [])
            if announced := self.publisher.take_sealed():
                emit(BlocksSealed(announced))

    def _end(self, flight: _Flight) -> _Result:
        """Wait for a step and update all requests."""
        sampled = self._sampled(flight)
        outputs, sealed = self.scheduler.update(flight.output, sampled) if sampled is not None else ([], [])
        filled, admitted = self.scheduler.prefixes.take()
        self.publisher.publish(sealed, filled)  # before the next launch: copies begin behind this step
        self.scheduler.record_step(flight.output, (self._monotonic() - flight.started_ns) / 1e9)
        self.renew_copy_budget()
        return _Result(flight.output.step, outputs, admitted, self.scheduler.pool.take_points())

    def _done(self, result: _Result) -> StepDone:
        """Report a step, with the blocks that others can read by now."""
        sealed, filled, stats = self.publisher.take_sealed(), self.publisher.take_filled(), self.scheduler.stats()
        stats.counters.update(self.publisher.state)
        return StepDone(result.step, result.outputs, sealed, stats, filled, result.admitted, result.points)

    def _sampled(self, flight: _Flight) -> Mapping[str, Sequence[Sampled]] | None:
        """Return the sampled tokens, or None if the step does not count because some requests failed."""
        try:
            if flight.failure is not None:
                raise flight.failure
            flight.is_collected = True
            return {} if flight.ticket is None else self.runner.collect(flight.ticket)
        except RequestsFailed as error:
            failed = flight.request_ids.intersection(error.request_ids)
            if not failed:  # the same step would run and fail for ever
                raise
            for request_id in sorted(failed):
                self.publisher.forget(request_id)
                self.scheduler.abort(request_id)
                self._failures.append(RequestFailed(request_id, error.message_of(request_id), error.is_callers_fault))
            return None

    def _emit_all(self, emit: Callable[[EngineEvent], None], events: Sequence[EngineEvent]) -> None:
        for event in events:
            emit(event)

    def _map_region(self, command: MapRegion, fds: Sequence[int]) -> None:
        """Map a region; a region that cannot be mapped fails only the imports that need it."""
        try:
            self.runner.map_region(command, *fds)
        except (RegionError, OSError) as error:
            log.warning("region %s cannot be mapped: %s", command.region_id, error)

    def _load(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> int:
        """Copy blocks of a prompt from another process; return 0 if any of them is gone."""
        try:
            self.scheduler.copy_budget.timed(partial(self.runner.import_blocks, blocks, extents))
        except CorruptBlock as error:
            log.error("a cached prefix is corrupt: %s", error)
            self.scheduler.count("blocks_corrupt")
            return 0
        except RegionError as error:
            log.info("a cached prefix is gone: %s", error)
            return 0
        return len(blocks)

    def _aborted(self, request_id: str, request: Request | None) -> RequestAborted:
        if request is None:
            return RequestAborted(request_id)
        return RequestAborted(
            request_id,
            num_computed_tokens=request.num_prompt_tokens_computed,
            num_cached_tokens=request.num_cached_tokens,
            num_loaded_tokens=request.num_loaded_tokens,
            num_generated_tokens=request.num_generated_tokens,
        )

    def _stats_only(self) -> StepDone:
        filled, admitted = self.scheduler.prefixes.take()
        self.publisher.publish([], filled)
        return self._done(_Result(self.scheduler.num_steps, [], admitted, self.scheduler.pool.take_points()))
