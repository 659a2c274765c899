"""Connects this gateway to one incarnation of an encode worker: a channel for calls, and the stream of its grants.

Each counted call says what was sent under the worker's grants up to it, so that the worker knows of calls that are on
their way. Of a call that has ended without an answer it hears on the stream: it may not have come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import grpc

from control_plane.admission.attachment import NUM_WITHOUT_GRANT, Attachment, Grant
from control_plane.fleet.registry import Worker
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_runtime.errors import TandemError, Unsupported
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import supervised

log = get_logger(__name__)

_RECONNECT_SECONDS = 0.2
_LONGEST_RESTART_SECONDS = 1.0
_OPENING_SECONDS = 1.0
"""Until then a worker that has granted nothing is expected to."""


class EncoderLink:
    """Of one incarnation; on one event loop."""

    def __init__(
        self,
        worker: Worker,
        channel: grpc.aio.Channel,
        hello: pb.AttachHello,
        on_attached: Callable[[Worker], None] = lambda worker: None,
        on_grant: Callable[[Worker, pb.Grant], None] = lambda worker, grant: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_attached` is called when the stream of grants has begun or ended, `on_grant` with each grant."""
        self.worker = worker
        self.channel = channel
        self.stub: worker_pb2_grpc.EncodeServiceAsyncStub = worker_pb2_grpc.EncodeServiceStub(channel)
        self.attachment = Attachment()
        """What was granted, and sent, on the stream that is open now."""
        self._hello = pb.AttachHello(worker_incarnation=worker.incarnation, uses_grants=True)
        self._hello.MergeFrom(hello)
        self._on_attached = on_attached
        self._on_grant = on_grant
        self._clock = clock
        self._stream = 0
        """The number that the worker has given to the stream; 0: none is open."""
        self._expected_until = clock() + _OPENING_SECONDS
        """A first grant is expected until then."""
        self._num_calls = 0
        """That run."""
        self._commands: asyncio.Queue[pb.GrantsCommand | None] = asyncio.Queue()
        self._latest: pb.GrantsCommand | None = None
        """The last command in the queue, if calls that have ended may join it."""
        loop = supervised("encoder-link", self._run, longest_pause_seconds=_LONGEST_RESTART_SECONDS)
        self._task = asyncio.create_task(loop, name=f"encoder-link-{worker.worker_id}")

    @property
    def uses_grants(self) -> bool:
        return self._stream > 0

    def has_room(self, num_tokens: int, num_calls: int = 1) -> bool | None:
        """Return whether calls are within the worker's grant; None: there is none, and the caller decides."""
        if self.attachment.grant is not None:
            return self.attachment.has_room(num_tokens, num_calls, self._clock())
        is_expected = self._clock() < self._expected_until
        return False if is_expected and self._num_calls + num_calls > NUM_WITHOUT_GRANT else None

    async def encode(self, request: pb.EncodeRequest, num_tokens: int, timeout: float) -> pb.EncodeReply:
        """Send a call, and return the reply. Raise TandemError."""
        if self._stream:
            sent = self.attachment
            sent.sent(num_tokens, self._clock())
            request.counted.CopyFrom(
                pb.CountedCall(stream=self._stream, number=sent.num_requests, sum_tokens=sent.num_tokens)
            )
        self._num_calls += 1
        try:
            return await self.stub.Encode(request, timeout=timeout)
        except BaseException:
            if request.HasField("counted"):
                self._ended(request.counted, num_tokens)
            raise
        finally:
            self._num_calls -= 1

    def report_waiting(self, waiting: pb.WaitingRequests | None = None) -> None:
        """Tell the worker what waits, which grant has come, and what was sent before."""
        grant = self.attachment.grant
        demand = pb.Demand(grant_number=grant.number if grant is not None else 0, waiting=waiting)
        self._send(pb.GrantsCommand(demand=demand))

    async def close(self, grace_seconds: float | None = None) -> None:
        """End the stream at once, and the calls after `grace_seconds`."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.channel.close(grace_seconds)

    def _ended(self, counted: pb.CountedCall, num_tokens: int) -> None:
        """Tell the worker that a call has ended without an answer; calls that end together share a message."""
        if counted.stream != self._stream:
            return
        if self._latest is None:
            self._latest = pb.GrantsCommand()
            self._send(self._latest)
        self._latest.ended.add(number=counted.number, num_tokens=num_tokens)
        self._count(self._latest)

    def _send(self, command: pb.GrantsCommand) -> None:
        self._count(command)
        self._commands.put_nowait(command)

    def _count(self, command: pb.GrantsCommand) -> None:
        command.num_calls, command.num_tokens = self.attachment.num_requests, self.attachment.num_tokens

    async def _run(self) -> None:
        while (reason := await self._stream_until_it_ends()) is not None:
            log.info("encoder_grants_ended", worker=self.worker.worker_id, reason=reason)
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _stream_until_it_ends(self) -> str | None:
        """Return why the stream ended; None: the worker is of an earlier release and has none."""
        try:
            async for event in self.stub.Grants(self._outgoing(self._commands)):
                self._handle(event)
        except Unsupported:
            return None
        except TandemError as error:
            return error.message
        finally:
            self._reset()
        return "the worker closed it"

    def _reset(self) -> None:
        """The stream is over, and with it all that was counted: what waits is sent by the worker's load."""
        self._stream, self._expected_until = 0, 0.0
        self.attachment = Attachment()
        self._commands.put_nowait(None)
        self._commands, self._latest = asyncio.Queue(), None
        self._on_attached(self.worker)

    async def _outgoing(self, commands: asyncio.Queue[pb.GrantsCommand | None]) -> AsyncIterator[pb.GrantsCommand]:
        """Yield the commands of one stream, which has its own queue: a dead stream takes no later command."""
        yield pb.GrantsCommand(hello=self._hello)
        while (command := await commands.get()) is not None:
            if command is self._latest:
                self._latest = None
            yield command

    def _handle(self, event: pb.GrantsEvent) -> None:
        if event.stream:
            self._stream = event.stream
            self._on_attached(self.worker)
        if event.HasField("grant"):
            grant = event.grant
            taken = Grant(grant.number, grant.num_tokens, grant.num_requests, grant.valid_ms / 1000)
            if self.attachment.granted(taken, self._clock()):
                self.report_waiting()
            self._on_grant(self.worker, grant)
