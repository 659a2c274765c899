"""Runs the steps of the engine, and carries out commands between them.

This module does not import torch; `Runner` computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from tandem_engine.extents import BlockPart
from tandem_engine.layout import SourceLayout
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
    Recompute,
    ReleaseHeld,
    RequestAborted,
    RequestFailed,
    SealedBlocks,
    SlabImported,
    StartDecode,
    StepDone,
    UnmapRegion,
)
from tandem_engine.scheduling.copy_budget import pieces
from tandem_engine.scheduling.hand_over import ImportRefused
from tandem_engine.scheduling.request import Request, Sampled
from tandem_engine.scheduling.scheduler import Scheduler, SchedulerOutput
from tandem_engine.scheduling.scheduler_config import SchedulerConfig

log = logging.getLogger(__name__)


class RegionError(ValueError):
    """A region is not mapped, or a slot was reused while it was read."""


class CorruptBlock(RegionError):
    """The bytes that were read differ from those that were written."""


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


class _Import:
    """A slab on its way into the pool; `copy` copies a range of its extents and returns the bytes."""

    def __init__(self, extents: Sequence[ExtentRef], copy: Callable[[slice], int]) -> None:
        self.num_blocks = len(extents)
        self.copy = copy
        self.pieces = pieces(extents)
        self.num_bytes = 0


class Runner(Protocol):
    """Owns the model and the KV tensors; reads requests and never changes them."""

    @property
    def generations(self) -> MutableSequence[int]:
        """One per slot, written by the block pool; shared memory where other processes read the pool."""
        ...

    def prepare(self, request: Request) -> bool:
        """Start what the request's first token needs besides its prompt; return whether all of it is ready."""
        ...

    def execute(
        self, output: SchedulerOutput, kv_written: Callable[[], None] = lambda: None
    ) -> Mapping[str, Sequence[Sampled]]:
        """Compute all runs; return, by request id, one token per choice seed for each run that samples.

        For a run with drafts: the drafts that equal the token sampled at their position, up to the first that does
        not, and the token sampled there.
        Calls `kv_written` at most once, as soon as other processes may read the keys and values of all runs.
        Raises RequestsFailed if only some requests caused the failure; any other exception ends the engine.
        """
        ...

    def import_blocks(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> int:
        """Copy each extent into the block beside it and return the bytes copied; raises RegionError, CorruptBlock."""
        ...

    def convert_blocks(
        self, parts: Sequence[Sequence[BlockPart]], extents: Sequence[ExtentRef], layout: SourceLayout
    ) -> int:
        """Fill the parts beside each extent, a block of `layout`, and return the bytes read; raises the same."""
        ...

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """Return the checksums of complete blocks; an empty list if this engine computes none."""
        ...

    def map_region(self, command: MapRegion, *fds: int) -> None:
        """Map a region read-only, of which `fds` are the descriptors; the caller closes them."""
        ...

    def unmap_region(self, region_id: str) -> None: ...


class EngineCore:
    """Joins scheduler and runner. For one thread: `handle` any number of commands, then `step` while `has_work`."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        clock: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """The clocks return nanoseconds: `clock` since 1970, for reports; `monotonic` for waits."""
        self.runner = runner
        self.scheduler = Scheduler(config, runner.generations, clock, self._load, runner.prepare, monotonic)
        self._monotonic = monotonic
        self._failures: list[RequestFailed] = []
        self._import: _Import | None = None

    def has_work(self) -> bool:
        """Whether `step` would do anything before the next command."""
        return self.scheduler.has_work

    def is_held(self) -> bool:
        """Whether `has_work` may become true without a command: look again soon."""
        return self.scheduler.is_held

    def step(self, emit: Callable[[EngineEvent], None] | None = None) -> StepDone:
        """Run one step; `take_failures` returns the requests that failed in it.

        Calls `emit` during the step with events that are ready before its end.
        """
        started = self._monotonic()
        output = self.scheduler.schedule()
        sampled = self._execute(output, emit)
        outputs, sealed = self.scheduler.update(output, sampled) if sampled is not None else ([], [])
        filled, admitted = self.scheduler.prefixes.take()
        sealed = self._with_checksums(sealed)
        filled = [replace(each, checksums=self.runner.checksums(each.slots)) for each in filled]
        self.scheduler.record_step(output, (self._monotonic() - started) / 1e9)
        self.renew_copy_budget()
        return StepDone(output.step, outputs, sealed, self.scheduler.stats(), filled, admitted)

    def run_step(self, emit: Callable[[EngineEvent], None]) -> None:
        """Run one step and emit its events, those of requests that failed in it included."""
        emit(self.step(emit))
        for failure in self.take_failures():
            emit(failure)

    def begin_turn(self) -> None:
        """Prepare for the commands between two steps."""
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
        """Do the same within the copy budget. None: handle the same command again before any other, after a step."""
        with self.scheduler.copy_budget.command():
            return self._carry_out(command, fds)

    def _carry_out(self, command: Command, fds: Sequence[int]) -> list[EngineEvent] | None:
        match command:
            case AddRequest():
                return [self.scheduler.add(command)]
            case ImportSlab():
                imported = self._import_some(command)
                return [imported] if imported is not None else None
            case StartDecode(request_id, token_ids):
                self.scheduler.start_decode(request_id, token_ids)
            case Recompute(request_id):
                self.scheduler.recompute(request_id)
            case AbortRequest(request_id):
                return [self._aborted(request_id, self.scheduler.abort(request_id)), self._stats_only()]
            case ReleaseHeld(request_id):
                self.scheduler.release_held(request_id)
                return [self._stats_only()]
            case MapRegion():
                assert fds, "a region's descriptors come with MapRegion"
                self._map_region(command, fds)
            case UnmapRegion(region_id):
                self.runner.unmap_region(region_id)
            case Ping():
                return [Pong()]
        return []  # Shutdown too: the process around the core handles it

    def _execute(
        self, output: SchedulerOutput, emit: Callable[[EngineEvent], None] | None
    ) -> Mapping[str, Sequence[Sampled]] | None:
        """Return the sampled tokens, or None if the step does not count because some requests failed."""

        def kv_written() -> None:
            if emit is not None and (sealed := self.scheduler.seal_written(output)):
                emit(BlocksSealed(self._with_checksums(sealed)))

        try:
            return self.runner.execute(output, kv_written) if output.runs else {}
        except RequestsFailed as error:
            failed = {run.request.request_id for run in output.runs}.intersection(error.request_ids)
            if not failed:  # the same step would run and fail for ever
                raise
            for request_id in sorted(failed):
                self.scheduler.abort(request_id)
                self._failures.append(RequestFailed(request_id, error.message_of(request_id), error.is_callers_fault))
            return None

    def _with_checksums(self, sealed: Sequence[SealedBlocks]) -> list[SealedBlocks]:
        return [replace(each, checksums=self.runner.checksums(each.slots)) for each in sealed]

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

    def _import_some(self, command: ImportSlab) -> SlabImported | None:
        """Copy blocks of a slab within the copy budget; None: some are left."""
        if not self.scheduler.copy_budget.has_left:
            return None
        try:
            slab, self._import = self._import or self._begin_import(command), None
            if not self._copy(slab):
                self._import = slab
                return None
        except (ImportRefused, RegionError) as error:
            if isinstance(error, CorruptBlock):
                log.error("a slab is corrupt: %s", error)
                self.scheduler.count("blocks_corrupt")
            return SlabImported(command.request_id, command.slab_index, 0, str(error))
        self.scheduler.mark_imported(command, slab.num_blocks, slab.num_bytes)
        return SlabImported(command.request_id, command.slab_index, slab.num_bytes)

    def _begin_import(self, command: ImportSlab) -> _Import:
        layout, runner = command.layout, self.runner
        if layout is not None:
            parts, extents = self.scheduler.conversion_targets(command, layout)
            return _Import(extents, lambda piece: runner.convert_blocks(parts[piece], extents[piece], layout))
        blocks, extents = self.scheduler.import_targets(command)
        return _Import(extents, lambda piece: runner.import_blocks(blocks[piece], extents[piece]))

    def _copy(self, slab: _Import) -> bool:
        budget = self.scheduler.copy_budget
        while budget.has_left:
            if (piece := next(slab.pieces, None)) is None:
                return True
            slab.num_bytes += budget.timed(partial(slab.copy, piece))
        return False

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
        return StepDone(self.scheduler.num_steps, [], [], self.scheduler.stats(), *self.scheduler.prefixes.take())
