"""What must a way between two KV services be able to do?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Unavailable


class LinkBroken(Unavailable):
    """The way failed, not what was asked for: another way may bring it."""


class Transport(Protocol):
    """One way to read from one peer. All methods are for the event loop."""

    @property
    def name(self) -> str:
        """As in `--transports`."""

    async def read(
        self, handle: pb.KvHandle, reader_id: str, slab: kv.Slab, into: Sequence[memoryview], first_block: int
    ) -> list[int]:
        """Fill one buffer per block of `slab` from `first_block` of the block table on; return their checksums.

        Nothing is written there any more once this has returned, raised or been cancelled. Raises LinkBroken,
        KvCorrupt (of field "checksums" if bytes were spoilt on the way), and whatever the holder refuses.
        """

    async def read_blocks(self, request: kv.ReadBlocksRequest, into: Sequence[memoryview]) -> list[int]:
        """Fill the leading buffers, as many as the peer's store has blocks of the chain; return their checksums.

        As `read` otherwise. Raises Unsupported if this way carries none.
        """

    async def probe(self, num_bytes: int) -> int:
        """Ask for that many zeroes; return how many bytes really moved. Raises LinkBroken."""

    async def close(self) -> None:
        """Take nothing new and hang up; a read that is under way ends by itself."""
