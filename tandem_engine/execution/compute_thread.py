"""Runs the steps of a runner on a thread of its own, so that the engine's thread can do other work meanwhile.

The kernels of a CPU release the interpreter's lock. One thread uses the op layer at a time: this one while a step runs,
the engine's between two steps (a draft model).

To hand a step over and back takes 0.06 ms (measured: `python -m benchmarks.overlap`). So a step that follows a short
one runs on the engine's thread, in `collect`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

import torch

from tandem_engine.core import Runner, Ticket
from tandem_engine.extents import BlockPart
from tandem_engine.layout import SourceLayout
from tandem_engine.messages import ExtentRef, MapRegion
from tandem_engine.scheduling.batch import SchedulerOutput
from tandem_engine.scheduling.request import Request, Sampled

SHORT_SECONDS = 0.004
"""A step that took less gains nothing from overlap."""

_Sampled = Mapping[str, Sequence[Sampled]]


@dataclass
class _Job:
    """A step on its way through the thread; `is_running` is False from the start if `collect` runs it."""

    output: SchedulerOutput
    kv_written: Callable[[], None]
    is_running: bool
    result: _Sampled | BaseException | None = None


class ComputeThread:
    """Implements `Runner` by another one, whose `launch` and `collect` run on the thread; `close` ends it."""

    def __init__(self, runner: Runner, short_seconds: float = SHORT_SECONDS) -> None:
        """Steps that follow one of less than `short_seconds` do not run on the thread."""
        self._runner = runner
        self._short_seconds = short_seconds
        self._last_seconds = short_seconds
        self._on_thread: _Job | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._ended: SimpleQueue[_Job] = SimpleQueue()
        self._num_threads = torch.get_num_threads()
        self._thread = Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    @property
    def wake_fd(self) -> int | None:
        """Written after `kv_written` and at the end of a step."""
        return self._wake_fd

    @property
    def generations(self) -> MutableSequence[int]:
        return self._runner.generations

    def prepare(self, request: Request) -> bool:
        return self._runner.prepare(request)

    def launch(self, output: SchedulerOutput, kv_written: Callable[[], None] = lambda: None) -> Ticket:
        """Hand the step to the thread, which calls `kv_written`; errors come from `collect`."""
        job = _Job(output, kv_written, is_running=self._last_seconds >= self._short_seconds)
        if job.is_running:
            self._on_thread = job
            self._jobs.put(job)
        return job

    def collect(self, ticket: Ticket) -> _Sampled:
        """Wait for the thread, or run the step."""
        assert isinstance(ticket, _Job), "a ticket of this runner"
        if ticket is not self._on_thread:
            return self._compute(ticket, ticket.kv_written)
        job = self._ended.get()
        assert job is ticket, "one step at a time"
        if isinstance(job.result, BaseException):
            raise job.result
        assert job.result is not None, "a step has a result or an error"
        return job.result

    def import_blocks(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> int:
        return self._runner.import_blocks(blocks, extents)

    def convert_blocks(
        self, parts: Sequence[Sequence[BlockPart]], extents: Sequence[ExtentRef], layout: SourceLayout
    ) -> int:
        return self._runner.convert_blocks(parts, extents, layout)

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return self._runner.checksums(blocks)

    def map_region(self, command: MapRegion, *fds: int) -> None:
        self._runner.map_region(command, *fds)

    def unmap_region(self, region_id: str) -> None:
        self._runner.unmap_region(region_id)

    def close(self) -> None:
        """End the thread after the step that runs, and close the eventfd; may be called again."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
            os.close(self._wake_fd)
        self._runner.close()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # torch counts its threads for each thread that calls
        while (job := self._jobs.get()) is not None:
            try:
                job.result = self._compute(job, self._waking(job.kv_written))
            except BaseException as error:  # noqa: BLE001 - `collect` raises it on the engine's thread
                job.result = error
            job.is_running = False
            self._ended.put(job)
            os.eventfd_write(self._wake_fd, 1)

    def _waking(self, kv_written: Callable[[], None]) -> Callable[[], None]:
        def written() -> None:
            kv_written()
            os.eventfd_write(self._wake_fd, 1)

        return written

    def _compute(self, job: _Job, written: Callable[[], None]) -> _Sampled:
        started = time.monotonic()
        try:
            return self._runner.collect(self._runner.launch(job.output, written))
        finally:
            self._last_seconds = time.monotonic() - started
