"""Serves tandem.v1.WorkerService: the Attach streams of gateways, the assets, the stats and the tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem.v1.tables_pb2 import TablesReply, TablesRequest
from tandem.v1.worker_pb2 import DrainReply, DrainRequest
from tandem_runtime.errors import InternalError, StaleIncarnation
from tandem_runtime.kv.table_parts import answer_parts
from tandem_runtime.log import get_logger
from tandem_runtime.tracebacks import message_of
from tandem_worker.engine_state import EngineState
from tandem_worker.front import WorkerFront
from tandem_worker.model_card import AssetStore
from tandem_worker.requests import GatewayStream

log = get_logger(__name__)


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The RPCs of a prefill or decode worker."""

    def __init__(self, front: WorkerFront, assets: AssetStore, info: Callable[[], pb.WorkerInfo]) -> None:
        self._front = front
        self._assets = assets
        self._info = info

    async def Attach(self, request_iterator: AsyncIterator[pb.Command], context: Any) -> AsyncIterator[pb.Event]:
        """Serve one gateway from its hello until either side ends the call; then cancel the gateway's requests."""
        stream = GatewayStream()
        self._front.attach(stream)
        reader = asyncio.create_task(_read(self._front, stream, request_iterator))
        try:
            async for event in stream.events():
                yield event
        finally:
            reader.cancel()
            self._front.detach(stream)

    async def GetAsset(self, request: pb.AssetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        async for chunk in self._assets.chunks(request.digest):
            yield chunk

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        return pb.StatsReply(info=self._info(), load=self._front.load())

    async def Tables(self, request: TablesRequest, context: Any) -> TablesReply:
        return self._front.tables(request.max_rows)

    async def Drain(self, request: DrainRequest, context: Any) -> DrainReply:
        return drain(self._front.state, self._front.incarnation, request)


def drain(state: EngineState, incarnation: str, request: DrainRequest) -> DrainReply:
    """Answer `Drain` for a worker of any role. Raise StaleIncarnation, InvalidRequest."""
    if request.incarnation != incarnation:
        raise StaleIncarnation(f"the gateway means worker incarnation {request.incarnation}, this is {incarnation}")
    return DrainReply(state=state.drain_by_operator(resume=request.resume))


async def _read(front: WorkerFront, stream: GatewayStream, commands: AsyncIterator[pb.Command]) -> None:
    try:
        async for command in commands:
            if command.WhichOneof("kind") == "choices":
                await _submit_choices(front, stream, command.choices)
            else:
                _handle(front, stream, command)
    except Exception as error:  # noqa: BLE001 - not swallowed: the call ends with this error
        stream.close(error)
    else:
        stream.close()


def _handle(front: WorkerFront, stream: GatewayStream, command: pb.Command) -> None:
    match command.WhichOneof("kind"):
        case "hello":
            _greet(front, stream, command.hello)
        case "submit":
            _submit(front, stream, command.submit)
        case "cancel":
            front.cancel(stream, command.cancel)
        case "demand":
            front.grants.demanded(stream, command.demand)
        case "read":
            stream.was_read(command.read.num_events)
        case "tables":
            stream.send_tables(answer_parts(command.tables, front.tables))


async def _submit_choices(front: WorkerFront, stream: GatewayStream, choices: pb.SubmitChoices) -> None:
    """Submit requests that share a prompt, each in its own turn of the loop: a long prompt takes milliseconds."""
    for choice in choices.choices:
        submit = pb.Submit()
        submit.CopyFrom(choices.shared)
        submit.MergeFrom(choice)
        _submit(front, stream, submit)
        await asyncio.sleep(0)


def _submit(front: WorkerFront, stream: GatewayStream, submit: pb.Submit) -> None:
    """Submit a request. If the front raises, only this request is refused; the gateway's others continue."""
    try:
        front.submit(stream, submit)
    except Exception as error:
        log.exception("submit_failed", request_id=submit.request_id)
        stream.refuse(submit, InternalError(f"the worker could not take the request: {message_of(error)}"))


def _greet(front: WorkerFront, stream: GatewayStream, hello: pb.AttachHello) -> None:
    if hello.worker_incarnation and hello.worker_incarnation != front.incarnation:
        raise StaleIncarnation(
            f"the gateway means worker incarnation {hello.worker_incarnation}, this is {front.incarnation}"
        )
    stream.gateway_id, stream.counts_events = hello.gateway_id, hello.counts_events
    reply = pb.AttachHello(
        gateway_id=hello.gateway_id,
        gateway_incarnation=hello.gateway_incarnation,
        worker_incarnation=front.incarnation,
        takes_choices=True,
        uses_grants=front.grants.is_used,
        answers_tables=True,
        counts_events=hello.counts_events,
    )
    stream.send(pb.Event(hello=reply))
    if hello.uses_grants:
        front.grants.attach(stream)
