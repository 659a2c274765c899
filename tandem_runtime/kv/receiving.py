"""Writes a stream of chunks into blocks in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from itertools import accumulate
from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import KvCorrupt
from tandem_runtime.kv.checksum import CHECKSUMS_METADATA, unpack_checksums


async def messages_of(call: Any) -> AsyncGenerator[Any, None]:
    """Yield the messages of a stream; the call ends when the caller stops iterating."""
    try:
        async for message in call:
            yield message
    finally:
        call.cancel()


async def fill_blocks(blocks: Sequence[memoryview], chunks: AsyncIterator[pb.Chunk]) -> int:
    """Write a stream of chunks over `blocks` and return how many it filled; it must end with a block."""
    index, offset, received = 0, 0, 0
    async for chunk in chunks:
        if chunk.offset != received:
            raise KvCorrupt(f"a chunk at byte {chunk.offset} where byte {received} was due")
        data = memoryview(chunk.data)
        received += len(data)
        while len(data):
            if index == len(blocks):
                raise KvCorrupt(f"the slab has more bytes than the {sum(map(len, blocks))} expected")
            piece = data[: len(blocks[index]) - offset]
            blocks[index][offset : offset + len(piece)] = piece
            offset += len(piece)
            data = data[len(piece) :]
            if offset == len(blocks[index]):
                index, offset = index + 1, 0
    if offset:
        raise KvCorrupt(f"a stream of blocks ended after {offset} of {len(blocks[index])} bytes of one")
    return index


def split_blocks(buffer: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Cut a writable buffer into consecutive blocks."""
    flat = buffer.cast("B")
    ends = list(accumulate(sizes))
    return [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def checksums_in(metadata: Any) -> list[int]:
    return next((unpack_checksums(value) for key, value in metadata or () if key == CHECKSUMS_METADATA), [])
