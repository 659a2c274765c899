"""The front of a worker process: passes commands of gateways to the engine process, and its outputs back.

The gRPC service calls a `WorkerFront`. A request goes submit -> KVOffload.add -> engine, then through the engine's
events: Reserved or Refused, StepDone for each step, and its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import TablesReply
from tandem_engine import messages
from tandem_runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    TandemError,
)
from tandem_runtime.log import get_logger
from tandem_runtime.model_table import Exactness
from tandem_runtime.tracebacks import message_of
from tandem_worker import convert, stats
from tandem_worker.engine_link import EngineLink
from tandem_worker.engine_state import EngineState
from tandem_worker.grant_sender import GrantSender
from tandem_worker.kv_connector import KVConnector
from tandem_worker.kv_offload import KVOffload
from tandem_worker.model_card import model_card
from tandem_worker.requests import ActiveRequest, GatewayStream, RequestTable, record_spans
from tandem_worker.submit_reader import SubmitReader

log = get_logger(__name__)


class WorkerFront:
    """Handles the commands of gateways and the events of the engine; every method runs on the event loop."""

    def __init__(
        self,
        incarnation: str,
        engine: EngineLink,
        requests: RequestTable,
        connector: KVConnector,
        offload: KVOffload,
        engine_timeout_seconds: float = 10.0,
        exactness: Exactness = "class",
        grants: GrantSender | None = None,
    ) -> None:
        """`grants`: tells gateways how much they may submit; None: they estimate it."""
        self.incarnation = incarnation
        self.grants = grants or GrantSender(None)
        self.card: pb.ModelCard | None = None
        self._exactness = exactness
        self._reader: SubmitReader | None = None
        self.state = EngineState(engine, engine_timeout_seconds, lambda: len(requests), self._fail_all)
        self._engine = engine
        self._requests = requests
        self._connector = connector
        self._offload = offload
        self._aborting: dict[str, tuple[ActiveRequest, TandemError]] = {}
        """Requests that have ended here; the engine has not reported yet what it had done for them."""
        self._streams: set[GatewayStream] = set()
        self._has_no_streams = asyncio.Event()
        self._has_no_streams.set()
        self._stats: messages.EngineStats | None = None
        self._bytes_per_block = 0
        self._preparing: asyncio.Task[None] | None = None
        self._when_ready: Callable[[dict[str, str]], None] = lambda paths: None

    def when_ready(self, callback: Callable[[dict[str, str]], None]) -> None:
        """Call `callback` with the paths of the assets once the worker is ready."""
        self._when_ready = callback

    def relay(self, heartbeat: Callable[[], cp.HeartbeatRequest], on_lost: Callable[[], None]) -> None:
        """Send heartbeats through the host's KV service, too; `on_lost` is called when it takes no more of them."""
        self._offload.relay(heartbeat, on_lost)

    # ------------------------------------------------------------------------------------- commands of gateways

    def submit(self, stream: GatewayStream, submit: pb.Submit) -> None:
        self.grants.received(stream, submit)
        request = ActiveRequest(submit, stream, num_choices_open=max(1, len(submit.choice_seeds)))
        try:
            command = self._command(request)
        except TandemError as error:
            stream.refuse(submit, error)
            return
        if not self._requests.add(request):
            log.warning("duplicate_submit_ignored", request_id=submit.request_id, attempt=submit.attempt)
            return
        self._watch_deadline(request)
        request.on_end.append(partial(self._on_end, request))
        self.grants.began(request)
        self._offload.add(request, command)

    def cancel(self, stream: GatewayStream, cancel: pb.Cancel) -> None:
        request = self._requests.get(f"{cancel.request_id}.{cancel.attempt}")
        if request is not None and request.stream is stream:
            self._abort_and_report(request, Cancelled("the gateway cancelled the request"))

    def attach(self, stream: GatewayStream) -> None:
        self._streams.add(stream)
        self._has_no_streams.clear()

    def detach(self, stream: GatewayStream) -> None:
        self._streams.discard(stream)
        if not self._streams:
            self._has_no_streams.set()
        for request in self._requests:
            if request.stream is stream:
                self.abort(request, Cancelled("the gateway's stream ended"))
        self.grants.detach(stream)

    def abort(self, request: ActiveRequest, error: TandemError) -> None:
        """End a request that still runs, in the engine and at the gateway."""
        self._engine.send(messages.AbortRequest(request.key))
        request.stream.fail(request.submit, error)
        self._requests.end(request, error)

    def _abort_and_report(self, request: ActiveRequest, error: TandemError) -> None:
        """End a request because of its client, who pays for what was computed: the engine reports that."""
        self._aborting[request.key] = request, error
        self._engine.send(messages.AbortRequest(request.key))
        self._requests.end(request, error)

    def _aborted(self, aborted: messages.RequestAborted) -> None:
        if found := self._aborting.pop(aborted.request_id, None):
            request, error = found
            request.ledger.MergeFrom(convert.aborted_ledger(aborted, request.submit))
            request.stream.fail(request.submit, error, request.ledger)

    def _command(self, request: ActiveRequest) -> messages.AddRequest:
        self.state.check_open(self.card)
        assert self._reader is not None, "a worker that is open has read its card"
        chain = self._reader.read(request.submit)
        if request.seconds_left <= 0:
            raise DeadlineExceeded("the request's deadline had passed when it arrived")
        return convert.add_request(request.submit, request.key, self._connector.mode(request.submit), chain)

    def _watch_deadline(self, request: ActiveRequest) -> None:
        def expire() -> None:
            error = DeadlineExceeded("the request's deadline passed while it ran; ask for fewer tokens")
            self._abort_and_report(request, error)

        timer = asyncio.get_running_loop().call_later(request.seconds_left, expire)
        request.on_end.append(lambda error: timer.cancel())

    def _on_end(self, request: ActiveRequest, error: TandemError | None) -> None:
        if error is None:
            record_spans(request, self._connector.spans(request.ledger))
        self._connector.on_end(request, error)
        self.grants.ended(request)

    # ------------------------------------------------------------------------------------- events of the engine

    async def pump(self) -> None:
        """Handle the engine's events until the engine ends; then fail the requests left, and set `stopped`."""
        try:
            async for event, fds in self.state.events():
                self._handle(event, fds)
        except Exception as error:  # noqa: BLE001 - kept, and the worker ends
            self.state.event_failed(error)
        finally:
            self.state.ended()

    def _handle(self, event: messages.EngineEvent, fds: Sequence[int]) -> None:
        match event:
            case messages.StepDone():
                self._step(event)
            case messages.BlocksSealed():
                self._sealed(event.sealed)
            case messages.Reserved() if request := self._requests.get(event.request_id):
                request.stream.accept(request.submit, self._stats.num_waiting if self._stats else 0)
                self.grants.reserved(request, self._connector.mode(request.submit))
                self._connector.on_reserved(request, event)
            case messages.Refused() if request := self._requests.get(event.request_id):
                self._refuse(request, convert.refusal(event))
            case messages.SlabImported():
                self._connector.on_imported(event)
            case messages.RequestAborted():
                self._aborted(event)
            case messages.RequestFailed() if request := self._requests.get(event.request_id):
                kind = InvalidRequest if event.is_callers_fault else InternalError
                self.abort(request, kind(event.message))
            case messages.DeviceMemoryUsed():
                self.state.device_memory_used(event)
            case messages.LoadProgress():
                self.state.loading(event)
            case messages.Ready():
                self._ready(event, fds)
            case messages.EngineFailed():
                self.state.engine_failed(event)
            case _:
                log.debug("event_for_ended_request", kind=type(event).__name__)

    def _step(self, done: messages.StepDone) -> None:
        self._stats = done.stats
        streams = set()
        for output in done.outputs:
            if request := self._requests.get(output.request_id):
                self._output(request, output)
                streams.add(request.stream)
        self._sealed(done.sealed)
        for stream in streams:
            stream.flush(done.step)
        self._offload.on_admitted(done.admitted)
        self.grants.stepped(done.stats, done.admitted)
        for filled in done.filled:
            self._offload.on_filled(self._requests.get(filled.request_id), filled)
        if done.points is not None:
            self._offload.on_points(done.points)
        for output in done.outputs:
            if output.is_last and (request := self._requests.get(output.request_id)):
                self._choice_ended(request)

    def _sealed(self, blocks: Sequence[messages.SealedBlocks]) -> None:
        for sealed in blocks:
            self._connector.on_sealed(sealed)

    def _output(self, request: ActiveRequest, output: messages.RequestOutput) -> None:
        wire = convert.output_to_proto(output, request.submit)
        if output.is_last:
            request.ledger.MergeFrom(convert.ledger(output, request.submit))
            wire.ledger.CopyFrom(request.ledger)
        self._connector.on_output(request, output, wire)
        self.grants.answered(request, len(output.token_ids))
        request.stream.add(wire)

    def _choice_ended(self, request: ActiveRequest) -> None:
        request.num_choices_open -= 1
        if request.num_choices_open == 0:
            self._offload.on_finished(request)
            self._requests.end(request, None)

    def _refuse(self, request: ActiveRequest, error: TandemError) -> None:
        self._requests.end(request, error)
        request.stream.refuse(request.submit, error, self.grants.refused(request, error))

    def _ready(self, ready: messages.Ready, fds: Sequence[int]) -> None:
        self._bytes_per_block = ready.layout.bytes_per_block
        self._stats = stats.stats_of_empty_pool(ready.num_blocks)
        self._connector.on_ready(ready, fds)
        self._offload.on_ready(ready)
        self._preparing = asyncio.create_task(self._prepare(ready))
        self.state.loaded()

    async def _prepare(self, ready: messages.Ready) -> None:
        """Get ready for requests; a worker that cannot get ready ends."""
        try:
            await self._get_ready(ready)
        except Exception as error:
            log.exception("startup_failed")
            self.state.fail(
                error if isinstance(error, TandemError) else InternalError(f"getting ready failed: {message_of(error)}")
            )
            self.state.stopped.set()

    async def _get_ready(self, ready: messages.Ready) -> None:
        self.state.progress = messages.LoadProgress(stage="waiting for the KV service of this host", fraction=1.0)
        await self._connector.wait_ready()
        self.card = model_card(ready, self._exactness)
        self._reader = SubmitReader(self.card)
        self.state.ready()
        self.grants.opened(stats.stats_of_empty_pool(ready.num_blocks), self.card.block_size)
        self._when_ready(ready.model.asset_paths)
        log.info(
            "ready",
            model=self.card.model_id,
            num_blocks=ready.num_blocks,
            context=self.card.context_length,
            numa_node=ready.numa_node,
        )

    def _fail_all(self, error: TandemError) -> None:
        for request in self._requests:
            self._engine.send(messages.AbortRequest(request.key))  # for an engine that was only silent
            request.stream.fail(request.submit, error)
            self._requests.end(request, error)
        aborting, self._aborting = self._aborting, {}
        for request, reason in aborting.values():
            request.stream.fail(request.submit, reason)

    # ------------------------------------------------------------------------------------------------- reports

    @property
    def kv_address(self) -> str:
        return self._connector.kv_address

    @property
    def stats(self) -> messages.EngineStats | None:
        """The engine's stats after its last step; None before it has loaded."""
        return self._stats

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a KV block; 0 before the engine has loaded."""
        return self._bytes_per_block

    def load(self) -> pb.LoadReport:
        """Return the worker's load after the engine's last step."""
        report = self.state.report()
        report.counters.update({**self._connector.counters(), **self._offload.counters})
        self._fill(report)
        return report

    def tables(self, max_rows: int) -> TablesReply:
        """Return the requests, handles and blocks that this worker keeps, for the auditor, and its gateways."""
        self._fill(now := pb.LoadReport())
        rows = [self.grants.row(stream) for stream in self._streams]
        return stats.worker_tables(self.incarnation, self._requests, self._connector, now.kv, rows, max_rows)

    def _fill(self, report: pb.LoadReport) -> None:
        if self._stats is not None:
            stats.fill_load(report, self._stats, self.card.block_size if self.card else 0, self._bytes_per_block)

    # -------------------------------------------------------------------------------------------------- ending

    async def drain(self, timeout_seconds: float) -> None:
        """Wait until the running requests and the readers of our blocks have finished; at most `timeout_seconds`."""
        log.info("draining", num_requests=len(self._requests))
        self.grants.close()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._requests.wait_idle()
                await self._connector.wait_drained()
        except TimeoutError:
            log.warning("drain_timed_out", num_requests=len(self._requests), seconds=timeout_seconds)
            self._fail_all(Draining("the worker stopped before the request was finished"))

    async def end_streams(self, timeout_seconds: float) -> None:
        """End every gateway's stream after its last event, so that each gateway receives all its tokens."""
        for stream in self._streams:
            stream.close()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._has_no_streams.wait()
        except TimeoutError:
            log.warning("gateway_streams_not_drained", num_streams=len(self._streams))

    async def close(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)
        self.grants.close()
        await self.state.close()
        await self._offload.close()
        await self._connector.close()
        await self._engine.stop()
