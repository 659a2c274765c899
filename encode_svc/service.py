"""Implements the gRPC service of an encode worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from encode_svc.front import EncodeFront
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem.v1.worker_pb2 import DrainReply, DrainRequest
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

    async def GetAsset(self, request: pb.AssetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        async for chunk in self._assets.chunks(request.digest):
            yield chunk

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        return pb.StatsReply(info=self._info(), load=self._front.load())

    async def Drain(self, request: DrainRequest, context: Any) -> DrainReply:
        return drain(self._front.state, self._incarnation, request)
