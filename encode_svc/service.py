"""Implements the gRPC service of an encode worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from encode_svc.front import EncodeFront
from encode_svc.grants import EncodeGrants, GrantsStream
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem.v1.worker_pb2 import DrainReply, DrainRequest
from tandem_runtime.errors import StaleIncarnation
from tandem_worker.model_card import AssetStore
from tandem_worker.service import drain


class EncodeService(worker_pb2_grpc.EncodeServiceServicer):
    """The RPCs of an encode worker."""

    def __init__(
        self, front: EncodeFront, incarnation: str, assets: AssetStore, info: Callable[[], pb.WorkerInfo]
    ) -> None:
        self._front = front
        self._incarnation = incarnation
        self._assets = assets
        self._info = info

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeReply:
        return await self._front.encode(request)

    async def Grants(
        self, request_iterator: AsyncIterator[pb.GrantsCommand], context: Any
    ) -> AsyncIterator[pb.GrantsEvent]:
        """Tell one gateway what it may send, from its hello until either side ends the call."""
        stream = GrantsStream()
        self._front.grants.opened(stream)
        reader = asyncio.create_task(_read(self._front.grants, self._incarnation, stream, request_iterator))
        try:
            async for event in stream.events():
                yield event
        finally:
            reader.cancel()
            self._front.grants.detach(stream)

    async def GetAsset(self, request: pb.AssetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        async for chunk in self._assets.chunks(request.digest):
            yield chunk

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        return pb.StatsReply(info=self._info(), load=self._front.load())

    async def Drain(self, request: DrainRequest, context: Any) -> DrainReply:
        return drain(self._front.state, self._incarnation, request)


async def _read(
    grants: EncodeGrants, incarnation: str, stream: GrantsStream, commands: AsyncIterator[pb.GrantsCommand]
) -> None:
    try:
        async for command in commands:
            if command.HasField("hello"):
                _greet(grants, incarnation, stream, command.hello)
            else:
                grants.commanded(stream, command)
    except Exception as error:  # noqa: BLE001 - not swallowed: the call ends with this error
        stream.close(error)
    else:
        stream.close()


def _greet(grants: EncodeGrants, incarnation: str, stream: GrantsStream, hello: pb.AttachHello) -> None:
    if hello.worker_incarnation != incarnation:
        raise StaleIncarnation(
            f"the gateway means worker incarnation {hello.worker_incarnation}, this is {incarnation}"
        )
    grants.attach(stream)
