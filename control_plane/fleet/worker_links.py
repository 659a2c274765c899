"""Connects this gateway to its workers: one Attach stream per incarnation, shared by all requests there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from control_plane.admission.attachment import Attachment, Grant
from control_plane.fleet.attached import Attached
from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.channel import open_worker_channel
from tandem_runtime.errors import InternalError, TandemError, Unavailable, from_proto
from tandem_runtime.kv.table_parts import TableQuestions
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet, Turns, supervised
from tandem_runtime.tracebacks import message_of

log = get_logger(__name__)

_ATTACHED = (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE)
_RECONNECT_SECONDS = 0.2
_LONGEST_RESTART_SECONDS = 1.0
_REPORT_SECONDS = 10.0
"""Longer than a step of an engine: an engine reports between two steps."""
_UNREAD_BYTES = 64 * 1024
"""About a thousand StepBatches, of a worker that does not count what is read."""
_READS_TOLD = 8
"""A worker hears after so many messages that they were read: half of what it leaves on its way."""

_ATTACH = f"/{worker_pb2.DESCRIPTOR.services_by_name['WorkerService'].full_name}/Attach"
_COMMAND_SUBMIT = pb.Command.SUBMIT_FIELD_NUMBER
_COMMAND_CHOICES = pb.Command.CHOICES_FIELD_NUMBER
_SHARED = pb.SubmitChoices.SHARED_FIELD_NUMBER
_CHOICES = pb.SubmitChoices.CHOICES_FIELD_NUMBER

Report = Callable[[pb.PhaseLedger | None], None]
"""Takes what a worker had done for a cancelled call; None: it does not say."""


class Sink(Protocol):
    """Receives the events of one call, on the event loop, in order; `ended` is the last one."""

    def accepted(self) -> None: ...

    def output(self, output: pb.TokenOutput) -> None: ...

    def worked(self, ledger: pb.PhaseLedger) -> None:
        """What the worker had done for a request that it does not finish; `ended` follows."""

    def ended(self, error: TandemError) -> None:
        """The worker refused the request, failed it, or is gone."""


@dataclass(frozen=True, eq=False)
class _Submits:
    """Requests with one prompt, which the link sends to the worker together."""

    prompt: bytes
    """A serialized Submit; b"": the requests have their own prompts."""
    requests: list[pb.Submit]

    def commands(self, takes_choices: bool) -> Iterator[bytes]:
        """Yield serialized Commands. The prompt is copied, and never parsed: 2 MB take under a millisecond."""
        if takes_choices and len(self.requests) > 1:
            shared = _field(_SHARED, self.prompt)
            choices = [_field(_CHOICES, request.SerializeToString()) for request in self.requests]
            yield _field(_COMMAND_CHOICES, shared, *choices)
            return
        for request in self.requests:
            yield _field(_COMMAND_SUBMIT, self.prompt, request.SerializeToString())


class WorkerLink:
    """The stream to one incarnation of a worker; reopened if it breaks while the worker is registered."""

    def __init__(
        self,
        worker: Worker,
        gateway_id: str,
        gateway_incarnation: str,
        member: FleetMember | None = None,
        turns: Turns | None = None,
        on_break: Callable[[Worker, int], None] = lambda worker, num_calls: None,
        on_attached: Callable[[Worker], None] = lambda worker: None,
        on_grant: Callable[[Worker, pb.Grant], None] = lambda worker, grant: None,
        clock: Callable[[], float] = time.monotonic,
        attached: Attached | None = None,
    ) -> None:
        """`turns` is shared by the links that should not open their streams in the same turn of the event loop.

        `on_break` is called when the stream has ended, with the number of calls that fail with it; `on_attached` when
        the worker has answered on a new one; `on_grant` with each grant, after the refusal that carries it. `attached`
        is shared by the links of a gateway.
        """
        self.worker = worker
        self.attached = Attached() if attached is None else attached
        """Has the worker's incarnation while it has answered the hello of the stream that is open now."""
        self._on_break = on_break
        self._on_attached = on_attached
        self._on_grant = on_grant
        self._clock = clock
        self.uses_grants = False
        """Whether the worker of the stream that is open now sends grants, and hears of what waits."""
        self.attachment = Attachment()
        """What was granted and sent on the stream that is open now, or opens next."""
        self.tables = TableQuestions(f"worker {worker.worker_id}")
        self._member = member
        self._turns = turns or Turns()
        self._hello = pb.AttachHello(
            gateway_id=gateway_id,
            gateway_incarnation=gateway_incarnation,
            worker_incarnation=worker.incarnation,
            uses_grants=True,
            counts_events=True,
        )
        self._sinks: dict[tuple[str, int], Sink] = {}
        self._reports: dict[tuple[str, int], Report] = {}
        self._commands: asyncio.Queue[pb.Command | _Submits | None] = asyncio.Queue()
        self._latest: _Submits | None = None
        """The last command in the queue, if more requests with its prompt may join it."""
        self._takes_choices = self._counts_events = False
        self._is_retiring = False
        loop = supervised("worker-link", self._run, longest_pause_seconds=_LONGEST_RESTART_SECONDS)
        self._task: asyncio.Task[None] | None = asyncio.create_task(loop, name=f"link-{worker.worker_id}")

    @property
    def num_requests(self) -> int:
        """Calls that wait for events of this worker."""
        return len(self._sinks)

    def requests(self) -> list[tuple[str, int]]:
        """Return request id and attempt of every call that waits for events of this worker."""
        return list(self._sinks)

    def submit(self, submit: pb.Submit, sink: Sink, prompt: bytes = b"") -> None:
        """Send a request; every later event of the request goes to `sink`.

        `prompt`: a serialized Submit with the beginning of the request's token ids and block hashes. Requests that
        share this object, and are submitted in one turn of the loop, share one message.
        """
        self._sinks[submit.request_id, submit.attempt] = sink
        if prompt and self._latest is not None and self._latest.prompt is prompt:
            self._latest.requests.append(submit)
            return
        self._latest = _Submits(prompt, [submit])
        self._commands.put_nowait(self._latest)

    def cancel(self, request_id: str, attempt: int, on_report: Report | None = None) -> None:
        """Cancel a request and drop its later events; unknown ids are ignored.

        `on_report` is called once, within some seconds, with what the worker had done.
        """
        key = request_id, attempt
        if self._sinks.pop(key, None) is None:
            if on_report is not None:
                on_report(None)
            return
        if on_report is not None:
            self._reports[key] = on_report
            asyncio.get_running_loop().call_later(_REPORT_SECONDS, self._report, key, None)
        self._latest = None  # a later request is sent after the cancel
        self._commands.put_nowait(pb.Command(cancel=pb.Cancel(request_id=request_id, attempt=attempt)))

    def report_waiting(self, waiting: pb.WaitingRequests | None = None) -> None:
        """Tell the worker what waits, and which grant has come, after all that was submitted before."""
        grant = self.attachment.grant
        demand = pb.Demand(grant_number=grant.number if grant is not None else 0, waiting=waiting)
        self._commands.put_nowait(pb.Command(demand=demand))

    def forget(self, request_id: str, attempt: int) -> None:
        """Drop the later events of a request that has finished."""
        self._sinks.pop((request_id, attempt), None)

    async def retire(self) -> None:
        """Read the last events of a worker that drains until it ends the stream, then close."""
        self._is_retiring = True
        try:
            if self._sinks and self._task is not None:
                await asyncio.wait([self._task])
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the stream; calls that are left end with Unavailable."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None  # else link, task, its CancelledError and their frames wait for the garbage collector

    async def _run(self) -> None:
        try:
            while not self._is_retiring:
                reason = await self._attach_until_it_ends()
                log.info("attach_ended", worker=self.worker.worker_id, reason=reason)
                self.attachment = Attachment()
                self._on_break(self.worker, len(self._sinks))
                self._fail_all(Unavailable(f"the stream to worker {self.worker.worker_id} broke: {reason}"))
                await asyncio.sleep(_RECONNECT_SECONDS)
        finally:
            self._fail_all(Unavailable(f"worker {self.worker.worker_id} is gone"))

    async def _attach_until_it_ends(self) -> str:
        """Return why the stream ended; our own error ends this stream only, never the next one."""
        try:
            await self._attach()
        except TandemError as error:
            return error.message
        except Exception as error:
            log.exception("attach_failed", worker=self.worker.worker_id)
            return message_of(error)
        finally:
            self.attached.discard(self.worker.incarnation)
            self.uses_grants = False
            self.tables.closed()
        return "the worker closed it"

    async def _attach(self) -> None:
        await self._turns.next()  # else 500 workers that come back at once are 500 channels in one turn of the loop
        async with open_worker_channel(self.worker.info, self._member, _UNREAD_BYTES) as channel:
            attach: Any = channel.stream_stream(_ATTACH, response_deserializer=pb.Event.FromString)
            num_read = 0
            async for event in attach(self._outgoing(self._commands)):
                self._handle(event)
                num_read += 1
                if self._counts_events and num_read % _READS_TOLD == 0:
                    self._commands.put_nowait(pb.Command(read=pb.EventsRead(num_events=num_read)))

    async def _outgoing(self, commands: asyncio.Queue[pb.Command | _Submits | None]) -> AsyncIterator[bytes]:
        """Yield the serialized commands of one stream.

        Each stream has its own queue, so a dead stream takes no later command. A stream is not known to take choices
        before its worker's hello.
        """
        self._takes_choices = self._counts_events = False
        yield pb.Command(hello=self._hello).SerializeToString()
        while (command := await commands.get()) is not None:
            if isinstance(command, pb.Command):
                yield command.SerializeToString()
                continue
            if command is self._latest:
                self._latest = None
            for serialized in command.commands(self._takes_choices):
                yield serialized

    def _handle(self, event: pb.Event) -> None:
        match event.WhichOneof("kind"):
            case "step":
                for output in event.step.outputs:
                    self._output(output)
            case "accepted":
                if sink := self._sinks.get((event.accepted.request_id, event.accepted.attempt)):
                    sink.accepted()
            case "refused":
                self._end(event.refused.request_id, event.refused.attempt, event.refused.error)
                if event.refused.HasField("grant"):
                    self._granted(event.refused.grant)
            case "grant":
                self._granted(event.grant)
            case "failed":
                ledger = event.failed.ledger if event.failed.HasField("ledger") else None
                self._end(event.failed.request_id, event.failed.attempt, event.failed.error, ledger)
            case "hello":
                self._takes_choices, self._counts_events = event.hello.takes_choices, event.hello.counts_events
                self.attached.add(self.worker.incarnation)
                self.uses_grants = event.hello.uses_grants
                self.tables.opened(partial(_ask, self._commands) if event.hello.answers_tables else None)
                log.info("attached", worker=self.worker.worker_id, incarnation=event.hello.worker_incarnation)
                self._on_attached(self.worker)
            case "tables":
                self.tables.received(event.tables)
            case "several":
                for each in event.several.events:
                    self._handle(each)

    def _granted(self, message: pb.Grant) -> None:
        grant = Grant(message.number, message.num_tokens, message.num_requests, message.valid_ms / 1000)
        if self.attachment.granted(grant, self._clock()):
            self.report_waiting()
        self._on_grant(self.worker, message)

    def _output(self, output: pb.TokenOutput) -> None:
        """Pass an output on; an output that its request rejects ends that request, not the stream of all others."""
        key = output.request_id, output.attempt
        sink = self._sinks.get(key)
        if sink is None:
            if output.HasField("ledger"):  # the phase had finished when the cancel came
                self._report(key, output.ledger)
            return
        try:
            sink.output(output)
        except Exception as error:
            if not isinstance(error, TandemError):
                log.exception("output_rejected", request_id=output.request_id)
                error = InternalError(f"an output of worker {self.worker.worker_id} was rejected: {message_of(error)}")
            self.cancel(output.request_id, output.attempt)
            sink.ended(error)

    def _end(self, request_id: str, attempt: int, detail: pb.ErrorDetail, ledger: pb.PhaseLedger | None = None) -> None:
        self._report((request_id, attempt), ledger)
        if sink := self._sinks.pop((request_id, attempt), None):
            if ledger is not None:
                sink.worked(ledger)
            sink.ended(from_proto(detail))

    def _report(self, key: tuple[str, int], ledger: pb.PhaseLedger | None) -> None:
        if on_report := self._reports.pop(key, None):
            on_report(ledger)

    def _fail_all(self, error: TandemError) -> None:
        """End every call with `error`, and drop unsent commands: a new stream must not send them."""
        sinks, self._sinks = self._sinks, {}
        self._commands.put_nowait(None)
        self._commands, self._latest = asyncio.Queue(), None
        for key in list(self._reports):
            self._report(key, None)
        for (request_id, _), sink in sinks.items():
            try:
                sink.ended(error)
            except Exception:  # one request must not keep the others from their end, nor the link from its next stream
                log.exception("call_not_ended", request_id=request_id)


class LinkPool:
    """A link to every prefill and decode worker that is registered."""

    def __init__(
        self, registry: WorkerRegistry, gateway_id: str, gateway_incarnation: str, member: FleetMember | None = None
    ) -> None:
        self._gateway_id = gateway_id
        self._member = member
        self._gateway_incarnation = gateway_incarnation
        self._links: dict[str, WorkerLink] = {}
        self.attached = Attached()
        """Incarnations whose streams are open, and that have answered on them."""
        self._closing = TaskSet()
        self._turns = Turns()
        self._listeners: list[Callable[[Worker, int], None]] = []
        self._attached_listeners: list[Callable[[Worker], None]] = []
        self._grant_listeners: list[Callable[[Worker, pb.Grant], None]] = []
        registry.listen(self._changed)

    def get(self, worker: Worker) -> WorkerLink:
        """Return the link to a worker's incarnation; raises Unavailable if the worker has gone."""
        link = self._links.get(worker.incarnation)
        if link is None:
            raise Unavailable(f"worker {worker.worker_id} is gone", retry_after_seconds=1.0)
        return link

    def listen(self, on_break: Callable[[Worker, int], None]) -> None:
        """Call `on_break` when a stream ends while its worker is registered; see `WorkerLink`."""
        self._listeners.append(on_break)

    def listen_to_attached(self, on_attached: Callable[[Worker], None]) -> None:
        """Call `on_attached` when a worker has answered on a new stream."""
        self._attached_listeners.append(on_attached)

    def listen_to_grants(self, on_grant: Callable[[Worker, pb.Grant], None]) -> None:
        """Call `on_grant` with each grant of a worker."""
        self._grant_listeners.append(on_grant)

    def attachment(self, incarnation: str) -> Attachment | None:
        """Return what was granted and sent on the stream to a worker; None: it is gone."""
        link = self._links.get(incarnation)
        return None if link is None else link.attachment

    def report_waiting(self, incarnation: str, waiting: pb.WaitingRequests) -> bool:
        """Tell a worker what waits; return False, and send nothing, if it does not use grants or is not attached."""
        link = self._links.get(incarnation)
        if link is None or not link.uses_grants:
            return False
        link.report_waiting(waiting)
        return True

    def questions(self, worker: Worker) -> TableQuestions | None:
        """Return what asks a worker for its tables on its stream; None: it is gone."""
        link = self._links.get(worker.incarnation)
        return None if link is None else link.tables

    def running(self) -> set[tuple[str, str, int]]:
        """Return worker incarnation, request id and attempt of every call that this gateway has open."""
        links = self._links.items()
        return {(incarnation, *request) for incarnation, link in links for request in link.requests()}

    async def close(self) -> None:
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), self._closing.cancel(), return_exceptions=True)

    def _broke(self, worker: Worker, num_calls: int) -> None:
        for listener in self._listeners:
            listener(worker, num_calls)

    def _attached(self, worker: Worker) -> None:
        for listener in self._attached_listeners:
            listener(worker)

    def _granted(self, worker: Worker, grant: pb.Grant) -> None:
        for listener in self._grant_listeners:
            listener(worker, grant)

    def _changed(self, worker: Worker, is_here: bool) -> None:
        if worker.role not in _ATTACHED:
            return
        if is_here and worker.incarnation not in self._links:
            self._links[worker.incarnation] = WorkerLink(
                worker,
                self._gateway_id,
                self._gateway_incarnation,
                self._member,
                self._turns,
                self._broke,
                self._attached,
                self._granted,
                attached=self.attached,
            )
        elif is_here:
            self._links[worker.incarnation].worker = worker  # its card comes once its model is loaded
        elif link := self._links.pop(worker.incarnation, None):
            self.attached.discard(worker.incarnation)
            link.attached = Attached()  # the end of this stream is not that of the next link's
            is_draining = worker.load.state == pb.WORKER_STATE_DRAINING
            self._closing.spawn(link.retire() if is_draining else link.close())


def _ask(commands: asyncio.Queue[pb.Command | _Submits | None], question: pb.AskTables) -> None:
    commands.put_nowait(pb.Command(tables=question))


def _field(number: int, *parts: bytes) -> bytes:
    """Return a field of a message that has `parts` as its content: protobuf merges serialized messages in a row.

    https://protobuf.dev/programming-guides/encoding/#last-one-wins
    """
    length_delimited = 2
    return b"".join((_varint(number << 3 | length_delimited), _varint(sum(map(len, parts))), *parts))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
