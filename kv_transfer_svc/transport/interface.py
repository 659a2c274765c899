"""The interface of a transport between two KV services, and the transport that always works: gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Unavailable
from tandem_runtime.kv.client import KvClient


class LinkBroken(Unavailable):
    """The transport failed, not the request: another transport may succeed."""


class Transport(Protocol):
    """Reads from one peer. All methods are for the event loop."""

    @property
    def name(self) -> str:
        """The name in `--transports`."""

    async def read(
        self, handle: pb.KvHandle, reader_id: str, slab: kv.Slab, into: Sequence[memoryview], first_block: int
    ) -> list[int]:
        """Fill one buffer per block of `slab`, from `first_block` of the block table on; return their checksums.

        No buffer is written after this has returned, raised or been cancelled. Raises LinkBroken, KvCorrupt (field
        "checksums" if bytes were corrupted in transit), and the errors of the holder.
        """

    async def read_blocks(self, request: kv.ReadBlocksRequest, into: Sequence[memoryview]) -> list[int]:
        """Fill one leading buffer per block of the chain in the peer's store; return their checksums.

        Otherwise as `read`. Raises Unsupported if the transport does not carry stored blocks.
        """

    async def probe(self, num_bytes: int) -> int:
        """Request `num_bytes` zeros; return how many bytes moved. Raises LinkBroken."""

    async def close(self) -> None:
        """Accept no new reads and disconnect; a read in progress ends by itself."""


class GrpcTransport:
    """A stream of chunks on the control channel. Works with every reachable peer, so its errors are the peer's own."""

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
        """Leave the channel open: it also carries the control calls."""
