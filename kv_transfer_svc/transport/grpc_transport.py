"""How are blocks read where nothing better goes? As a gRPC stream of chunks, beside everything else on the channel."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.client import KvClient


class GrpcTransport:
    """Always works where the peer can be reached at all; its errors are therefore the peer's own."""

    name = "grpc"

    def __init__(self, client: KvClient) -> None:
        self._client = client

    async def read(
        self, handle: pb.KvHandle, reader_id: str, slab: kv.Slab, into: Sequence[memoryview], first_block: int
    ) -> list[int]:
        return await self._client.receive(handle, reader_id, slab, into, first_block)

    async def read_blocks(self, request: kv.ReadBlocksRequest, into: Sequence[memoryview]) -> list[int]:
        return await self._client.read_blocks(request, into)

    async def probe(self, num_bytes: int) -> int:
        await self._client.probe(num_bytes)
        return num_bytes

    async def close(self) -> None:
        """The channel is not ours: it carries the control calls too."""
