"""The front of an encode worker: passes calls of gateways to the engine process, and its values back.

A call has no state: it is answered once, or ends with an error after which another worker can answer it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Literal

from encode_svc.call_counts import Amount
from encode_svc.grants import EncodeGrants, window_tokens
from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_engine.encoder.messages import (
    CancelTexts,
    EncoderReady,
    EncoderStats,
    EncodeTexts,
    TextInput,
    TextsEncoded,
    TextsRefused,
    num_tokens_in,
)
from tandem_runtime.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    TandemError,
)
from tandem_runtime.log import get_logger
from tandem_runtime.tracebacks import message_of
from tandem_runtime.tracing import record_span
from tandem_worker.engine_link import EngineLink
from tandem_worker.engine_state import EngineState
from tandem_worker.model_card import check_model, encoder_card

log = get_logger(__name__)

_RETRY_SECONDS = 1.0
_POOLINGS: tuple[Literal["", "mean", "cls", "last"], ...] = ("", "mean", "cls", "last")


@dataclass(frozen=True, eq=False)
class _Call:
    """A call that the engine has."""

    request: pb.EncodeRequest
    submitted_ns: int
    answer: asyncio.Future[pb.EncodeReply]

    @cached_property
    def num_tokens(self) -> int:
        return num_tokens_in(self.request.inputs)


class EncodeFront:
    """Handles the calls of gateways and the events of the engine; every method runs on the event loop."""

    def __init__(
        self, engine: EngineLink, engine_timeout_seconds: float = 10.0, *, max_calls: int = 256, step_tokens: int = 2048
    ) -> None:
        """`max_calls` that the engine takes at a time; `step_tokens`: of one of its steps."""
        self.grants = EncodeGrants(max_calls, self._here)
        self.card: pb.ModelCard | None = None
        self.stats: EncoderStats | None = None
        self.state = EngineState(engine, engine_timeout_seconds, lambda: len(self._calls), self._fail_all)
        self._engine = engine
        self._calls: dict[int, _Call] = {}
        self._step_tokens = step_tokens
        self._num_tokens_sent = 0
        """To the engine, since its start."""
        self._keys = count()
        self._idle = asyncio.Event()
        self._idle.set()
        self._when_ready: Callable[[dict[str, str]], None] = lambda paths: None

    @property
    def kv_address(self) -> str:
        """No KV service: this worker has no KV blocks."""
        return ""

    def when_ready(self, callback: Callable[[dict[str, str]], None]) -> None:
        """Call `callback` with the paths of the assets once the worker is ready."""
        self._when_ready = callback

    # ------------------------------------------------------------------------------------------ calls of gateways

    async def encode(self, request: pb.EncodeRequest) -> pb.EncodeReply:
        """Return the values of the inputs. Raise TandemError. If this is cancelled, the engine drops the call."""
        self.grants.came(request, num_tokens_in(request.inputs))
        check_model(self.state.check_open(self.card), request.model)
        seconds = request.time_left_ms / 1000
        if seconds <= 0:
            raise DeadlineExceeded("the request's deadline had passed when it arrived")
        command = _command(next(self._keys), request)
        call = _Call(request, time.time_ns(), asyncio.get_running_loop().create_future())
        self._calls[command.key] = call
        self._idle.clear()
        self._num_tokens_sent += call.num_tokens
        self._engine.send(command)
        try:
            async with asyncio.timeout(seconds):
                reply = await call.answer
        except TimeoutError:
            self._engine.send(CancelTexts(command.key))
            raise DeadlineExceeded("the request's deadline passed while it waited; send fewer inputs") from None
        except asyncio.CancelledError:
            self._engine.send(CancelTexts(command.key))
            raise
        finally:
            self._forget(command.key)
        _record_span(request, reply.ledger)
        return reply

    def _forget(self, key: int) -> None:
        self._calls.pop(key, None)
        if not self._calls:
            self._idle.set()
        self.grants.changed()

    def _here(self) -> Amount:
        """Return the calls that are not answered, and their tokens that are not computed, by the engine's stats."""
        if not self._calls:
            return Amount(0, 0)
        num_tokens = self._num_tokens_sent
        if self.stats is not None:
            num_tokens += self.stats.num_tokens_in_flight - self.stats.num_tokens_received
        return Amount(len(self._calls), num_tokens)

    # ------------------------------------------------------------------------------------------ events of the engine

    async def pump(self) -> None:
        """Handle the engine's events until it ends; then fail the calls left, and set `state.stopped`."""
        try:
            async for event, _ in self.state.events():
                self._handle(event)
        except Exception as error:  # noqa: BLE001 - kept, and the worker ends
            self.state.event_failed(error)
        finally:
            self.state.ended()

    def _handle(self, event: object) -> None:
        match event:
            case TextsEncoded():
                self._encoded(event)
            case TextsRefused():
                self._end(event.key, _refusal(event))
            case EncoderStats():
                self.stats = event
                self.grants.changed()
            case messages.DeviceMemoryUsed():
                self.state.device_memory_used(event)
            case messages.LoadProgress():
                self.state.loading(event)
            case EncoderReady():
                self._ready(event)
            case messages.EngineFailed():
                self.state.engine_failed(event)
            case messages.Pong():
                pass  # the watch has heard it
            case _:
                raise InternalError(f"the engine of an encode worker sent {type(event).__name__}")

    def _encoded(self, event: TextsEncoded) -> None:
        call = self._calls.get(event.key)
        if call is None or call.answer.done():
            return
        ledger = pb.EncodeLedger(
            num_tokens=event.num_tokens,
            submitted_ns=call.submitted_ns,
            scheduled_ns=event.scheduled_ns,
            finished_ns=event.finished_ns,
        )
        call.answer.set_result(pb.EncodeReply(values=event.values, ledger=ledger))

    def _end(self, key: int, error: TandemError) -> None:
        call = self._calls.get(key)
        if call is not None and not call.answer.done():
            call.answer.set_exception(error)

    def _ready(self, ready: EncoderReady) -> None:
        try:
            self.card = encoder_card(ready)
            self.state.loaded()
            self.state.ready()
            self.grants.open(window_tokens(self._step_tokens, self.card.context_length))
            self._when_ready(ready.model.asset_paths)
        except Exception as error:
            log.exception("startup_failed")
            self.state.fail(
                error if isinstance(error, TandemError) else InternalError(f"getting ready failed: {message_of(error)}")
            )
            self.state.stopped.set()
            return
        encoder = ready.encoder
        log.info("encoder_ready", model=self.card.model_id, task=encoder.task, num_values=encoder.num_values)

    def _fail_all(self, error: TandemError) -> None:
        for key in list(self._calls):
            self._engine.send(CancelTexts(key))  # for an engine that was only silent
            self._end(key, error)

    # ------------------------------------------------------------------------------------------------- reports, end

    def load(self) -> pb.LoadReport:
        """Return the worker's load: its calls, of which the engine's last step says how many wait."""
        report = self.state.report()
        report.num_tokens_in_flight = sum(call.num_tokens for call in self._calls.values())
        if self.stats is not None:
            report.num_waiting = min(self.stats.num_waiting, len(self._calls))
            report.counters.update(self.stats.counters)
        report.num_running = len(self._calls) - report.num_waiting
        return report

    async def drain(self, timeout_seconds: float) -> None:
        """Grant nothing more, and wait until the running calls have finished; at most `timeout_seconds`."""
        self.grants.close()
        log.info("draining", num_requests=len(self._calls))
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            log.warning("drain_timed_out", num_requests=len(self._calls), seconds=timeout_seconds)
            self._fail_all(Draining("the worker stopped before the request was finished"))

    async def end_streams(self, timeout_seconds: float) -> None:
        """End the streams of grants; a call ends with its answer."""
        self.grants.end_streams()

    async def close(self) -> None:
        await self.state.close()
        await self._engine.stop()


def _refusal(refused: TextsRefused) -> TandemError:
    match refused.reason:
        case "invalid":
            return InvalidRequest(refused.message, field="inputs")
        case "full":
            return Overloaded(refused.message, retry_after_seconds=_RETRY_SECONDS)
        case "failed":
            return InternalError(refused.message)


def _command(key: int, request: pb.EncodeRequest) -> EncodeTexts:
    """Return the engine's command. Raise InvalidRequest for a call without inputs or with an unknown pooling."""
    if not request.inputs:
        raise InvalidRequest("the call has no inputs; send one or more", field="inputs")
    pooling = next((each for each in _POOLINGS if each == request.pooling), None)
    if pooling is None:
        raise InvalidRequest(f"pooling is {request.pooling!r}; send mean, cls or last, or none", field="pooling")
    inputs = [TextInput(each.token_ids, each.num_first_tokens) for each in request.inputs]
    return EncodeTexts(key, inputs, pooling, request.fairness_key)


def _record_span(request: pb.EncodeRequest, ledger: pb.EncodeLedger) -> None:
    """Record the queue and the computation as children of the gateway's span."""
    if not request.traceparent:
        return
    attributes: dict[str, str | int] = {"tandem.request.id": request.request_id, "tandem.num_tokens": ledger.num_tokens}
    times = ledger.submitted_ns, ledger.scheduled_ns, ledger.finished_ns
    for name, start_ns, end_ns in (("queue", *times[:2]), ("encode", *times[1:])):
        record_span(name, request.traceparent, start_ns, max(start_ns, end_ns), attributes)
