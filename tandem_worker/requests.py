"""The requests that run on a worker, and the streams that carry their answers to gateways."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.time_left import stated_seconds_left
from tandem_runtime.tracing import record_span
from tandem_worker.waiting_step import WaitingStep


class GatewayStream:
    """The answers to one gateway. The outputs of one step leave as one StepBatch, with those that wait to leave.

    A gateway reads some thousand messages a second. Where its workers' steps are more, it gets fewer, larger batches,
    and what is sent after them waits for no other. The queue needs no bound of its own: it holds at most the tokens
    that accepted requests may still produce. The engine's queue and each request's max_tokens bound those.
    """

    def __init__(self, gateway_id: str = "") -> None:
        self.gateway_id = gateway_id
        self._queue: asyncio.Queue[pb.Event | Exception | _NextPart | None] = asyncio.Queue()
        self._batch: list[pb.TokenOutput] = []
        self._waiting: WaitingStep | None = None
        self._parts: deque[pb.TablesPart] = deque()
        """Of the tables; while there are some, the place of the next one is in the queue."""

    def send(self, event: pb.Event) -> None:
        self._waiting = None
        self._queue.put_nowait(event)

    def accept(self, submit: pb.Submit, num_queued: int) -> None:
        accepted = pb.Accepted(request_id=submit.request_id, attempt=submit.attempt, num_queued=num_queued)
        self.send(pb.Event(accepted=accepted))

    def refuse(self, submit: pb.Submit, error: TandemError, grant: pb.Grant | None = None) -> None:
        """`grant`: the gateway's new one."""
        refused = pb.Refused(request_id=submit.request_id, attempt=submit.attempt, error=error.to_proto(), grant=grant)
        self.send(pb.Event(refused=refused))

    def fail(self, submit: pb.Submit, error: TandemError, ledger: pb.PhaseLedger | None = None) -> None:
        """`ledger`: what this phase had done, if the engine has reported that."""
        failed = pb.Failed(request_id=submit.request_id, attempt=submit.attempt, error=error.to_proto(), ledger=ledger)
        self.send(pb.Event(failed=failed))

    def add(self, output: pb.TokenOutput) -> None:
        """Add an output to the batch that `flush` sends."""
        self._batch.append(output)

    def flush(self, step: int) -> None:
        """Send the outputs of a step: with those of earlier steps if these are still here."""
        batch, self._batch = self._batch, []
        if not batch:
            return
        if self._waiting is not None and self._waiting.add(step, batch):
            return
        waiting = WaitingStep(step, batch)
        self.send(waiting.event)
        self._waiting = waiting

    def send_tables(self, parts: Iterable[pb.TablesPart]) -> None:
        """Send tables instead of those whose parts are left. Events that come meanwhile wait for one part at most."""
        has_place = bool(self._parts)
        self._parts = deque(parts)
        if not has_place:
            self._queue.put_nowait(_NEXT_PART)

    def close(self, error: Exception | None = None) -> None:
        """End the stream after the events sent so far; with an error if there is one."""
        self._queue.put_nowait(error)

    async def events(self) -> AsyncIterator[pb.Event]:
        """Yield the events until `close`; raises its error."""
        while (event := await self._queue.get()) is not None:
            if isinstance(event, Exception):
                raise event
            if self._waiting is not None and event is self._waiting.event:
                self._waiting = None
            yield event if isinstance(event, pb.Event) else self._next_part()

    def _next_part(self) -> pb.Event:
        part = self._parts.popleft()
        if self._parts:
            self._queue.put_nowait(_NEXT_PART)
        return pb.Event(tables=part)


class _NextPart:
    """The place of a part in the queue of events."""


_NEXT_PART = _NextPart()


@dataclass(eq=False)
class ActiveRequest:
    """One request between its Submit and its end on this worker; owned by the front, on its event loop."""

    submit: pb.Submit
    stream: GatewayStream
    ledger: pb.PhaseLedger = field(default_factory=pb.PhaseLedger)
    """The KV connector adds bytes, transport and times here; the engine reports the rest."""
    num_choices_open: int = 1
    on_end: list[Callable[[TandemError | None], None]] = field(default_factory=list)
    """Called once each, in order, with the error that ended the request; None if the request finished."""

    @property
    def key(self) -> str:
        """The request's id in the engine: the gateway's id and attempt."""
        return f"{self.submit.request_id}.{self.submit.attempt}"

    def __post_init__(self) -> None:
        """Take the deadline from the time left, by our own clock: the gateway's may differ."""
        stated = stated_seconds_left(self.submit)
        seconds = self.submit.deadline_unix_ms / 1000 - time.time() if stated is None else stated
        self._ends_at = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return self._ends_at - time.monotonic()

    @property
    def deadline_unix_ms(self) -> int:
        """The deadline by this machine's clock."""
        return int((time.time() + self.seconds_left) * 1000)


class RequestTable:
    """All active requests by engine id; ends each exactly once."""

    def __init__(self) -> None:
        self.num_so_far = 0
        self._requests: dict[str, ActiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[ActiveRequest]:
        """Iterate over a copy: requests may end meanwhile."""
        return iter(list(self._requests.values()))

    def get(self, key: str) -> ActiveRequest | None:
        return self._requests.get(key)

    def add(self, request: ActiveRequest) -> bool:
        """Return False and change nothing if the request is in the table already."""
        if request.key in self._requests:
            return False
        self._requests[request.key] = request
        self.num_so_far += 1
        self._idle.clear()
        return True

    def end(self, request: ActiveRequest, error: TandemError | None) -> None:
        """Remove a request and run its `on_end` callbacks; does nothing for a request that has ended."""
        if self._requests.pop(request.key, None) is None:
            return
        callbacks, request.on_end = request.on_end, []
        for callback in callbacks:
            callback(error)
        if not self._requests:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()


@dataclass(frozen=True)
class PhaseSpan:
    """One span of a request's trace, between two moments of its ledger (Unix nanoseconds, 0: did not happen)."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int]


def record_spans(request: ActiveRequest, spans: Iterable[PhaseSpan]) -> None:
    """Record the phases that happened, as children of the gateway's span."""
    submit = request.submit
    if not submit.traceparent:
        return
    for span in spans:
        if span.start_ns and span.end_ns:
            attributes = {"tandem.request.id": submit.request_id, **span.attributes}
            record_span(span.name, submit.traceparent, span.start_ns, max(span.start_ns, span.end_ns), attributes)
