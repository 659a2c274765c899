"""How do a gateway's commands come in, and how do the tokens of a step go back to it?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import InternalError, StaleIncarnation, TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)


class CommandHandler(Protocol):
    """What a worker does with commands; never raises, answers through the stream."""

    incarnation: str

    def submit(self, stream: GatewayStream, submit: pb.Submit) -> None: ...

    def cancel(self, stream: GatewayStream, cancel: pb.Cancel) -> None: ...

    def attached(self, stream: GatewayStream) -> None:
        """A gateway is here; `detached` follows, once."""

    def detached(self, stream: GatewayStream) -> None:
        """The gateway is gone: everything it asked for is cancelled."""


class GatewayStream:
    """The answers to one gateway; the outputs of a step are gathered and leave as one StepBatch.

    The queue needs no bound of its own: it holds at most the tokens that accepted requests may still produce, and
    those are bounded by the engine's queue and each request's max_tokens.
    """

    def __init__(self, gateway_id: str = "") -> None:
        self.gateway_id = gateway_id
        self._queue: asyncio.Queue[pb.Event | Exception | None] = asyncio.Queue()
        self._batch: list[pb.TokenOutput] = []

    def send(self, event: pb.Event) -> None:
        self._queue.put_nowait(event)

    def accept(self, submit: pb.Submit, num_queued: int) -> None:
        accepted = pb.Accepted(request_id=submit.request_id, attempt=submit.attempt, num_queued=num_queued)
        self.send(pb.Event(accepted=accepted))

    def refuse(self, submit: pb.Submit, error: TandemError) -> None:
        refused = pb.Refused(request_id=submit.request_id, attempt=submit.attempt, error=error.to_proto())
        self.send(pb.Event(refused=refused))

    def fail(self, submit: pb.Submit, error: TandemError) -> None:
        failed = pb.Failed(request_id=submit.request_id, attempt=submit.attempt, error=error.to_proto())
        self.send(pb.Event(failed=failed))

    def add(self, output: pb.TokenOutput) -> None:
        """Put an output into the batch that `flush` sends."""
        self._batch.append(output)

    def flush(self, step: int) -> None:
        if self._batch:
            self.send(pb.Event(step=pb.StepBatch(step=step, outputs=self._batch)))
            self._batch = []

    def close(self, error: Exception | None = None) -> None:
        """End the stream behind what was sent so far, with an error if there is one."""
        self._queue.put_nowait(error)

    async def events(self) -> AsyncIterator[pb.Event]:
        """Yield what is sent until `close`; raises its error."""
        while (event := await self._queue.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event


async def serve_attach(
    handler: CommandHandler,
    commands: AsyncIterator[pb.Command],
    context: grpc.aio.ServicerContext[pb.Command, pb.Event],
) -> AsyncIterator[pb.Event]:
    """Serve one Attach call from its hello to its end, on either side; then cancel what is left of it."""
    stream = GatewayStream()
    handler.attached(stream)
    reader = asyncio.create_task(_read(handler, stream, commands))
    try:
        async for event in stream.events():
            yield event
    finally:
        reader.cancel()
        handler.detached(stream)


async def _read(handler: CommandHandler, stream: GatewayStream, commands: AsyncIterator[pb.Command]) -> None:
    try:
        async for command in commands:
            _handle(handler, stream, command)
    except Exception as error:  # noqa: BLE001 - not swallowed: the call ends with it
        stream.close(error)
    else:
        stream.close()


def _handle(handler: CommandHandler, stream: GatewayStream, command: pb.Command) -> None:
    match command.WhichOneof("kind"):
        case "hello":
            _greet(handler, stream, command.hello)
        case "submit":
            _submit(handler, stream, command.submit)
        case "cancel":
            handler.cancel(stream, command.cancel)


def _submit(handler: CommandHandler, stream: GatewayStream, submit: pb.Submit) -> None:
    """A request that breaks us is refused by itself; the others of this gateway go on."""
    try:
        handler.submit(stream, submit)
    except Exception as error:
        log.exception("submit_broke", request_id=submit.request_id)
        stream.refuse(submit, InternalError(f"the worker could not take the request: {error!r}"))


def _greet(handler: CommandHandler, stream: GatewayStream, hello: pb.AttachHello) -> None:
    if hello.worker_incarnation and hello.worker_incarnation != handler.incarnation:
        raise StaleIncarnation(
            f"the gateway means worker incarnation {hello.worker_incarnation}, this is {handler.incarnation}"
        )
    stream.gateway_id = hello.gateway_id
    answer = pb.AttachHello(
        gateway_id=hello.gateway_id,
        gateway_incarnation=hello.gateway_incarnation,
        worker_incarnation=handler.incarnation,
    )
    stream.send(pb.Event(hello=answer))
