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

_MOST_UNREAD = 16
"""Messages on their way to a gateway that has not told yet that it has read them. A gateway that is busy reads some
fifty a second."""
_MOST_TOGETHER, _MOST_OUTPUTS_TOGETHER, _MOST_BYTES_TOGETHER = 64, 512, 256 << 10
"""Events in one message, their outputs and their bytes: a gateway takes them in at once."""


class GatewayStream:
    """The answers to one gateway. The outputs of one step leave as one StepBatch, with those that wait to leave.

    A gateway reads some thousand messages a second, and far fewer while it is busy. Where its workers' steps are more,
    it gets fewer, larger batches; and all that waits while enough events are unread leaves in one message. The queue
    needs no bound of its own: it holds at most the tokens that accepted requests may still produce. The engine's queue
    and each request's max_tokens bound those.
    """

    def __init__(self, gateway_id: str = "") -> None:
        self.gateway_id = gateway_id
        self.counts_events = False
        """Whether the gateway tells what it has read, and takes several events in one."""
        self._queue: deque[pb.Event | Exception | _NextPart | None] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False
        self._num_sent = self._num_read = 0
        self._batch: list[pb.TokenOutput] = []
        self._waiting: WaitingStep | None = None
        self._parts: deque[pb.TablesPart] = deque()
        """Of the tables; while there are some, the place of the next one is in the queue."""

    def send(self, event: pb.Event) -> None:
        self._waiting = None
        self._put(event)

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
            self._put(_NEXT_PART)

    def was_read(self, num_events: int) -> None:
        """The gateway has read so many messages of `events` so far."""
        self._num_read = max(self._num_read, num_events)
        self._changed.set()

    def close(self, error: Exception | None = None) -> None:
        """End the stream after the events sent so far, read or not; with an error if there is one."""
        self._is_closed = True
        self._put(error)

    async def events(self) -> AsyncIterator[pb.Event]:
        """Yield the events until `close`, several in one if they have waited; raises its error."""
        while True:
            await self._until_next()
            event = self._queue.popleft()
            if event is None:
                return
            if isinstance(event, Exception):
                raise event
            self._num_sent += 1
            if isinstance(event, pb.Event):
                yield self._with_following(event)
            else:
                yield self._next_part()

    def _put(self, event: pb.Event | Exception | _NextPart | None) -> None:
        self._queue.append(event)
        self._changed.set()

    async def _until_next(self) -> None:
        """Wait for an event to send, and for the gateway to read."""
        while not self._queue or self._has_unread:
            self._changed.clear()
            await self._changed.wait()

    @property
    def _has_unread(self) -> bool:
        return self.counts_events and not self._is_closed and self._num_sent - self._num_read >= _MOST_UNREAD

    def _with_following(self, event: pb.Event) -> pb.Event:
        """Return an event that has left the queue with those after it, as far as they go into one message."""
        events = [self._taken(event)]
        if not self.counts_events or not self._queue:
            return event
        num_bytes, num_outputs = event.ByteSize(), len(event.step.outputs)
        while self._queue and isinstance(following := self._queue[0], pb.Event):
            num_bytes, num_outputs = num_bytes + following.ByteSize(), num_outputs + len(following.step.outputs)
            is_large = num_bytes > _MOST_BYTES_TOGETHER or num_outputs > _MOST_OUTPUTS_TOGETHER
            if is_large or len(events) == _MOST_TOGETHER:
                break
            self._queue.popleft()
            events.append(self._taken(following))
        return event if len(events) == 1 else pb.Event(several=pb.Events(events=events))

    def _taken(self, event: pb.Event) -> pb.Event:
        """Let no later step join an event that leaves."""
        if self._waiting is not None and event is self._waiting.event:
            self._waiting = None
        return event

    def _next_part(self) -> pb.Event:
        part = self._parts.popleft()
        if self._parts:
            self._put(_NEXT_PART)
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
