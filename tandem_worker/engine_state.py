"""Whether a worker's engine loads, serves, keeps silent, drains or has failed, and what the worker reports of that."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable

from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_engine.channel import Received
from tandem_runtime.device_reader import EngineMemory
from tandem_runtime.errors import Draining, InternalError, InvalidRequest, TandemError, Unavailable
from tandem_runtime.log import get_logger
from tandem_runtime.memory import MemoryProbe
from tandem_runtime.tasks import supervised
from tandem_runtime.tracebacks import message_of
from tandem_worker.engine_link import EngineLink
from tandem_worker.engine_watch import EngineWatch

log = get_logger(__name__)

EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h: a restart would fail for the same reason."""


class EngineState:
    """The state of one engine process; every method runs on the event loop."""

    def __init__(
        self, engine: EngineLink, timeout_seconds: float, num_requests: Callable[[], int], fail_all: FailAll
    ) -> None:
        """`fail_all` ends every request with an error: the engine is silent, or has ended."""
        self.failure: TandemError | None = None
        self.stopped = asyncio.Event()
        self.value = pb.WORKER_STATE_LOADING
        self.progress = messages.LoadProgress(stage="starting the engine", fraction=0.0)
        self.watch = EngineWatch(
            engine,
            timeout_seconds,
            is_busy=lambda: num_requests() > 0,
            on_silent=self.silent,
            on_answer=self._answers,
        )
        self._engine = engine
        self._num_requests = num_requests
        self._fail_all = fail_all
        self._is_ending = False
        self._watching: asyncio.Task[None] | None = None
        self._when_changed: Callable[[], None] = lambda: None
        self.engine_memory: EngineMemory | None = None
        """The device memory that the engine counts; None: it loads."""
        self._memory = MemoryProbe(
            lambda: {os.getpid(), *([engine.pid] if engine.pid else [])}, lambda: self.engine_memory
        )

    def when_changed(self, callback: Callable[[], None]) -> None:
        """Call `callback` when `report` differs: the engine fell silent or answers again, or an operator drains."""
        self._when_changed = callback

    def check_open(self, card: pb.ModelCard | None) -> pb.ModelCard:
        """Return the model card if new requests may come. Raise Unavailable or Draining."""
        if self.failure is not None:
            raise Unavailable(f"the worker's engine has failed: {self.failure.message}")
        if self.value == pb.WORKER_STATE_DRAINING:
            raise Draining("the worker is draining and accepts no new requests", retry_after_seconds=1.0)
        if self.watch.is_silent:
            raise Unavailable("the worker's engine does not answer", retry_after_seconds=1.0)
        if card is None:
            raise Unavailable("the worker is still loading its model", retry_after_seconds=2.0)
        return card

    async def events(self) -> AsyncIterator[Received]:
        """Yield the engine's events until it ends; its failure ends the iteration, too, and is kept.

        An exception of the reader belongs into `event_failed`.
        """
        try:
            async for received in self._engine.events():
                self.watch.heard(time.monotonic())
                yield received
        except TandemError as error:
            self.fail(error)

    def event_failed(self, error: Exception) -> None:
        """The reader of `events` could not handle one: the worker ends."""
        if isinstance(error, TandemError):
            self.fail(error)
            return
        log.exception("engine_event_failed")
        self.fail(InternalError(f"an event of the engine could not be handled: {message_of(error)}"))

    def ended(self) -> None:
        """No more events come: fail the requests left, and set `stopped`."""
        why = self.failure.message if self.failure else "it was stopped"
        self._fail_all(Unavailable(f"the worker's engine has ended: {why}"))
        self.stopped.set()

    def loading(self, progress: messages.LoadProgress) -> None:
        self.progress = progress
        log.info("loading", stage=progress.stage, fraction=round(progress.fraction, 2))

    def device_memory_used(self, used: messages.DeviceMemoryUsed) -> None:
        """Keep what the engine counts itself: NVML cannot always tell whose memory a device's is."""
        self.engine_memory = EngineMemory(used.device_uuid, used.num_bytes)

    def loaded(self) -> None:
        """The engine answers from now on: watch it."""
        self._watching = asyncio.create_task(supervised("engine_watch", self.watch.run))

    def ready(self) -> None:
        if self.value == pb.WORKER_STATE_LOADING:  # a worker that drains already stays so
            self.value = pb.WORKER_STATE_READY
        self.progress = messages.LoadProgress(stage="ready", fraction=1.0)

    def engine_failed(self, failed: messages.EngineFailed) -> None:
        kind = InvalidRequest if failed.kind in ("unsupported", "invalid") else InternalError
        self.fail(kind(failed.message))

    def fail(self, error: TandemError) -> None:
        self.failure = error
        self.value = pb.WORKER_STATE_FAILED
        if isinstance(error, InvalidRequest):
            log.error("model_refused", error=error.message)
        else:
            log.error("engine_failed", error=error.message)

    def silent(self, seconds: float) -> None:
        """Let the requests go on elsewhere; an engine that wakes forgets them."""
        log.error("engine_silent", pid=self._engine.pid, seconds=round(seconds, 1), num_requests=self._num_requests())
        self._fail_all(Unavailable(f"the worker's engine has not answered for {seconds:.0f} s"))
        self._when_changed()

    def _answers(self, seconds: float) -> None:
        log.warning("engine_answers_again", pid=self._engine.pid, seconds=round(seconds, 1))
        self._when_changed()

    async def read_memory(self) -> None:
        """Take the first reading of GPU and host memory, off the event loop; before the first report.

        Waits some seconds at most for a driver that hangs.
        """
        await asyncio.to_thread(self._memory.read)

    @property
    def memory(self) -> pb.MemoryReport:
        """The latest reading of GPU and host memory; from any thread."""
        return self._memory.latest

    def report(self) -> pb.LoadReport:
        """Return a load report with all that is known of the engine here."""
        is_silent = self.watch.is_silent and self.value == pb.WORKER_STATE_READY
        return pb.LoadReport(
            state=pb.WORKER_STATE_LOADING if is_silent else self.value,
            memory=self._memory.report(),
            load_progress=self.progress.fraction,
            load_stage="the engine process does not answer" if is_silent else self.progress.stage,
            error=str(self.failure or ""),
        )

    def start_draining(self) -> None:
        """Refuse new requests from now on, and report the state DRAINING: the process ends."""
        self._is_ending = True
        if self.value != pb.WORKER_STATE_FAILED:
            self.value = pb.WORKER_STATE_DRAINING

    def drain_by_operator(self, *, resume: bool) -> pb.WorkerState.ValueType:
        """Drain until the operator resumes; return the state from now on. Raise InvalidRequest.

        The process stays, unlike after SIGTERM: a worker that ends can no longer be resumed.
        """
        if self.value == pb.WORKER_STATE_LOADING:
            raise InvalidRequest("it is still loading its model; drain it once it is ready", field="worker")
        if self.value == pb.WORKER_STATE_FAILED:
            raise InvalidRequest("it has failed, and accepts no requests; start it again", field="worker")
        if resume and self._is_ending:
            raise InvalidRequest("it is about to end and cannot be resumed; start it again", field="worker")
        before, self.value = self.value, pb.WORKER_STATE_READY if resume else pb.WORKER_STATE_DRAINING
        if before != self.value:
            log.info("drain_changed", is_draining=not resume, num_requests=self._num_requests())
            self._when_changed()
        return self.value

    @property
    def exit_code(self) -> int:
        """The exit code for a supervisor: 0 drained, 1 failed, EXIT_CONFIG if a restart would fail again."""
        if self.failure is None:
            return 0
        return EXIT_CONFIG if isinstance(self.failure, InvalidRequest) else 1

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)


FailAll = Callable[[TandemError], None]
