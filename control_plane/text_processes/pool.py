"""Prepares bodies in text processes: within a budget of processor time and memory, and fair over accounts.

A body of up to 64 KiB takes a slot of the small lane, whose processes run at normal priority. A larger one takes a slot
of the large lane, in the background. A process that exceeds a bound is killed; its slot gets another one by a fork.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from opentelemetry.metrics import CallbackOptions, Observation

from control_plane.generation import ModelDescription
from control_plane.text.prepared import Asked, PreparedBody, TextJob
from control_plane.text.public_prefixes import PublicPrefixes
from control_plane.text.text_service import Parse, Resolve
from control_plane.text.vocabulary import Vocabulary
from control_plane.text_processes.lanes import Lane
from control_plane.text_processes.text_process import JobWatch, TextProcess
from control_plane.text_processes.wire import (
    MEMORY,
    Done,
    Drop,
    Ended,
    Failed,
    Named,
    Run,
    Use,
)
from control_plane.text_processes.zygote_link import ZygoteLink
from tandem_machine.cores import num_usable_cores
from tandem_runtime import metrics
from tandem_runtime.errors import Aborted, InternalError, InvalidRequest, TandemError, Unavailable
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet

log = get_logger(__name__)

SMALL_BODY_BYTES = 64 * 1024
_MIN_PROCESSES = 3
_MAX_DEFAULT_PROCESSES = 8
_NUM_SMALL = 3
_FINISH_SECONDS = 1.0
"""A job whose client has left may go on for this long, since another process is dearer; then it is killed."""
_MAX_RUNS = 8
"""Of one body: tokenizers to load and lost processes make it run again."""


@dataclass(frozen=True)
class TextLimits:
    """What text processes may use."""

    num_processes: int = 0
    """For bodies above 64 KiB; 0: as many as the cores, at least 3 and at most 8."""
    cpu_seconds: float = 2.0
    cpu_seconds_per_mb: float = 3.0
    memory_mb: int = 256
    """Of one body of a megabyte or more; a shorter one may take less."""
    max_waiting: int = 512
    max_waiting_bytes: int = 128_000_000
    max_account_bytes: int = 10_000_000
    """Of the bodies of one account that are prepared at a time. One body alone may have more."""

    def max_cpu_seconds(self, num_bytes: int) -> float:
        return self.cpu_seconds + self.cpu_seconds_per_mb * num_bytes / 1e6

    def max_memory_bytes(self, num_bytes: int) -> int:
        """Return a quarter of `memory_mb`, and the rest by the length of the body."""
        return int((self.memory_mb << 20) * min(1.0, 0.25 + num_bytes / 1e6))

    @property
    def num_large(self) -> int:
        return self.num_processes or max(_MIN_PROCESSES, min(num_usable_cores(), _MAX_DEFAULT_PROCESSES))


class _Outdated(Exception):
    """A text process assumed a model that its name does not mean any more."""


class _NeedsTokenizer(Exception):
    def __init__(self, model: ModelDescription) -> None:
        super().__init__(model.model_id)
        self.model = model


class TextProcesses:
    """Implements text_service.Preparer. `start` before the first request, `close` after the last."""

    def __init__(self, limits: TextLimits | None = None, public_prefixes: PublicPrefixes | None = None) -> None:
        self.limits = limits or TextLimits()
        self.zygote = ZygoteLink(public_prefixes.texts if public_prefixes is not None else None)
        bounds = self.limits.max_waiting, self.limits.max_waiting_bytes, self.limits.max_account_bytes
        self.small = Lane("small", _NUM_SMALL, *bounds)
        self.large = Lane("large", self.limits.num_large, *bounds)
        self._idle: dict[str, list[TextProcess]] = {self.small.name: [], self.large.name: []}
        self._all: set[TextProcess] = set()
        self._tasks = TaskSet()
        self._meter = _TextMeter([self.small, self.large])

    def start(self) -> None:
        self.zygote.start()

    async def close(self) -> None:
        """End all text processes."""
        for task in self._tasks:
            task.cancel()
        for process in tuple(self._all):
            self._end(process)
        await self.zygote.close()

    @property
    def pids(self) -> list[int]:
        return sorted(process.pid for process in self._all if process.pid)

    async def prepare(
        self,
        job: TextJob,
        raw: bytes,
        account: str,
        parse: Parse,
        resolve: Resolve,
        on_begun: Callable[[], None] | None = None,
    ) -> tuple[PreparedBody, Vocabulary]:
        """Prepare a body in a text process. Raise TandemError."""
        lane = self.small if len(raw) <= SMALL_BODY_BYTES else self.large
        was_lost, may_assume = False, lane is self.small
        for _ in range(_MAX_RUNS):
            try:
                return await self._run_in(lane, job, raw, account, resolve, on_begun, may_assume=may_assume)
            except _Outdated:
                may_assume = False
            except _NeedsTokenizer as needs:
                await self.zygote.load(needs.model)
            except Ended as error:
                if was_lost:
                    raise Aborted(
                        "the text process that prepared this request ended unexpectedly, and so did the next one; "
                        "change the request, or have an operator look at the gateway's log"
                    ) from error
                was_lost = True
        raise Unavailable("the gateway's text processes are restarting; try again", retry_after_seconds=1.0)

    async def _run_in(
        self,
        lane: Lane,
        job: TextJob,
        raw: bytes,
        account: str,
        resolve: Resolve,
        on_begun: Callable[[], None] | None,
        *,
        may_assume: bool,
    ) -> tuple[PreparedBody, Vocabulary]:
        arrived = time.monotonic()
        await lane.take(account, len(raw))
        started = time.monotonic()
        process: TextProcess | None = None
        try:
            process = self._take_idle(lane) or await self._spawn(lane)
            if on_begun is not None:
                on_begun()
            return await self._run(process, job, raw, resolve, may_assume=may_assume)
        finally:
            self._release(lane, account, len(raw), process)
            # Later: a metric must not delay the prompt.
            asyncio.get_running_loop().call_soon(self._meter.ran, lane, started - arrived, time.monotonic() - started)

    async def _run(
        self, process: TextProcess, job: TextJob, raw: bytes, resolve: Resolve, *, may_assume: bool
    ) -> tuple[PreparedBody, Vocabulary]:
        """Run one job. Raise the job's TandemError, _Outdated, _NeedsTokenizer, or Ended if the process died."""
        max_cpu_seconds = self.limits.max_cpu_seconds(len(raw))
        watch = JobWatch(process, max_cpu_seconds, self._kill)
        watch.start()
        process.has_job = True
        try:
            max_memory_bytes = self.limits.max_memory_bytes(len(raw))
            await process.channel.send(Run(job, max_cpu_seconds, max_memory_bytes, may_assume), raw)
            answer = await process.channel.receive()
            vocabulary = None
            if isinstance(answer, Named):
                vocabulary = await self._use(process, answer, await self._resolved(process, answer, resolve))
                answer = await process.channel.receive()
        except Ended:
            process.is_over = True
            self._raise_if_bounded(process, watch, len(raw))
            raise
        finally:
            watch.stop()
        assert isinstance(answer, Done | Failed), "a job ends with Done or Failed"
        process.has_job = False
        process.cpu_seconds = answer.cpu_seconds
        process.is_over = answer.is_last
        if answer.assumed is not None:
            vocabulary = self._assumed(process, answer.assumed, await resolve(answer.assumed))
        if isinstance(answer, Failed):
            raise self._error(answer, len(raw))
        assert vocabulary is not None, "a job is done after its model was found"
        return answer.body, vocabulary

    async def _resolved(self, process: TextProcess, named: Named, resolve: Resolve) -> ModelDescription:
        process.awaits_model = True
        try:
            return await resolve(named.asked)
        except TandemError:
            await self._drop(process)
            raise

    def _assumed(self, process: TextProcess, asked: Asked, model: ModelDescription) -> Vocabulary:
        """Return the vocabulary of a model that a process used without asking. Raise _Outdated, _NeedsTokenizer."""
        if process.told.get(asked.model) != model.facts:
            raise _Outdated
        vocabulary = self.zygote.vocabulary_if_loaded(process.generation, model)
        if vocabulary is None:
            raise _NeedsTokenizer(model)
        return vocabulary

    async def _use(self, process: TextProcess, named: Named, model: ModelDescription) -> Vocabulary:
        vocabulary = self.zygote.vocabulary_if_loaded(process.generation, model)
        if vocabulary is None:
            await self._drop(process)
            raise _NeedsTokenizer(model)
        process.awaits_model = False
        process.tell(named.asked.model, model.facts)
        await process.channel.send(Use(model.facts, model.identity))
        return vocabulary

    async def _drop(self, process: TextProcess) -> None:
        await process.channel.send(Drop())
        process.has_job = process.awaits_model = False
        process.cpu_seconds = process.now()[0]

    def _take_idle(self, lane: Lane) -> TextProcess | None:
        idle = self._idle[lane.name]
        while idle:
            process = idle.pop()
            if process.is_usable:
                return process
            self._end(process)
        return None

    async def _spawn(self, lane: Lane) -> TextProcess:
        channel, generation = await self.zygote.spawn(
            is_background=lane is self.large, max_memory_bytes=self.limits.memory_mb << 20
        )
        process = TextProcess(channel, generation)
        self._all.add(process)
        try:
            await process.begin()
        except BaseException:
            self._end(process)
            raise
        return process

    def _release(self, lane: Lane, account: str, num_bytes: int, process: TextProcess | None) -> None:
        if process is not None and process.has_job and not process.is_over:
            self._tasks.spawn(self._finish(lane, account, num_bytes, process), name="text-job-left")
            return
        if process is not None:
            self._keep(lane, process)
        lane.give_back(account, num_bytes)

    async def _finish(self, lane: Lane, account: str, num_bytes: int, process: TextProcess) -> None:
        """Let a job end whose client has left, for a moment; then kill its process. It holds its slot meanwhile."""
        is_over, process.is_over = process.is_over, True  # unless its answer is read to the end below
        try:
            async with asyncio.timeout(_FINISH_SECONDS):
                answer = None if process.awaits_model else await process.channel.receive()
                if isinstance(answer, Done | Failed):
                    process.has_job, process.cpu_seconds, process.is_over = False, answer.cpu_seconds, answer.is_last
                else:
                    await self._drop(process)
                    process.is_over = is_over
        except Ended:
            process.has_job = False
        except TimeoutError:
            self._kill(process, "client_left", 0.0, 0)
        finally:
            self._keep(lane, process)
            lane.give_back(account, num_bytes)

    def _keep(self, lane: Lane, process: TextProcess) -> None:
        if process.may_serve:  # whether it still lives is asked when it is taken
            self._idle[lane.name].append(process)
        else:
            self._end(process)

    def _end(self, process: TextProcess) -> None:
        """Forget a process. One without a job ends with its connection, another one is killed."""
        process.is_over = True
        self._all.discard(process)
        if process.has_job:
            process.kill("closed")
        process.channel.close()

    def _kill(self, process: TextProcess, reason: str, cpu_seconds: float, memory_bytes: int) -> None:
        self._meter.killed(reason)
        log.warning(
            "text_process_killed",
            reason=reason,
            pid=process.pid,
            cpu_seconds=round(cpu_seconds, 2),
            memory_mb=memory_bytes >> 20,
        )
        process.kill(reason)

    def _raise_if_bounded(self, process: TextProcess, watch: JobWatch, num_bytes: int) -> None:
        """Raise InvalidRequest if a process has ended because its job exceeded a bound."""
        if process.killed_for == "cpu":
            raise self._too_slow(num_bytes)
        # The tokenizer's library ends the process if it gets no memory.
        if watch.memory_bytes > self.limits.max_memory_bytes(num_bytes) // 4:
            self._meter.killed(MEMORY)
            raise self._too_large(num_bytes)
        log.warning("text_process_ended", pid=process.pid)

    def _error(self, failed: Failed, num_bytes: int) -> TandemError:
        if failed.kind == MEMORY:
            self._meter.killed(MEMORY)
            return self._too_large(num_bytes)
        kind = _errors().get(failed.kind)
        if kind is None:
            log.error("text_job_failed", kind=failed.exception, frames=list(failed.frames))
            return InternalError(f"internal error ({failed.exception}); the server's log has the details")
        return kind(failed.message, field=failed.field)

    def _too_slow(self, num_bytes: int) -> InvalidRequest:
        return InvalidRequest(
            f"preparing this request took more than {self.limits.max_cpu_seconds(num_bytes):.3g} seconds of processor "
            f"time, the limit for a body of {num_bytes:,} bytes; send a shorter or simpler body (messages, tools, "
            "schema or grammar), or have the operator raise --text-cpu-seconds"
        )

    def _too_large(self, num_bytes: int) -> InvalidRequest:
        return InvalidRequest(
            f"preparing this request took more than {self.limits.max_memory_bytes(num_bytes) >> 20} MiB of memory, the "
            f"limit for a body of {num_bytes:,} bytes; send a shorter or simpler body, or have the operator raise "
            "--text-memory-mb"
        )


def _errors() -> dict[str, type[TandemError]]:
    """Return every class of error by its name; HTTP's own are made where the endpoints are."""
    found: dict[str, type[TandemError]] = {}
    waiting: list[type[TandemError]] = [TandemError]
    for kind in waiting:  # grows meanwhile
        found[kind.__name__] = kind
        waiting += kind.__subclasses__()
    return found


class _TextMeter:
    """The metrics of the text processes; no label comes from a request."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        meter, self._lanes = metrics.meter(), tuple(lanes)
        self._waits = meter.create_histogram(
            "tandem.text.queue.duration",
            unit="s",
            description="From a body's arrival to a text process for it.",
            explicit_bucket_boundaries_advisory=metrics.SECONDS,
        )
        self._runs = meter.create_histogram(
            "tandem.text.duration",
            unit="s",
            description="Time of one body in its text process.",
            explicit_bucket_boundaries_advisory=metrics.SECONDS,
        )
        self._kills = meter.create_counter(
            "tandem.text.kills", unit="{process}", description="Text processes that a bound has ended, by reason."
        )
        meter.create_observable_gauge(
            "tandem.text.waiting", [self._waiting], unit="{request}", description="Bodies that wait for a text process."
        )

    def ran(self, lane: Lane, wait_seconds: float, run_seconds: float) -> None:
        self._waits.record(wait_seconds, {"tandem.text.lane": lane.name})
        self._runs.record(run_seconds, {"tandem.text.lane": lane.name})

    def killed(self, reason: str) -> None:
        self._kills.add(1, {"tandem.text.reason": reason})

    def _waiting(self, options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(lane.num_waiting, {"tandem.text.lane": lane.name}) for lane in self._lanes]
