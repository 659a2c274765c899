"""How does a slab become a stream of chunks?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import xxhash

from runtime.kv.shared_region import SharedRegion
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb

CHUNK_BYTES = 1 << 20


class SlabReader:
    """Iterates over a slab's bytes in chunks of at most 1 MiB; `checksums` are complete after the last one.

    Every copy is followed by a look at the slot's generation: raises KvCorrupt when the slot was reused, KvNotFound
    when the region is gone.
    """

    def __init__(self, slab: kv.Slab, memory_of: Callable[[str], SharedRegion]) -> None:
        self.checksums: list[int] = list(slab.checksums)
        self._slab = slab
        self._memory_of = memory_of

    def __iter__(self) -> Iterator[pb.Chunk]:
        offset = 0
        pending: list[bytes] = []
        num_pending = 0
        for piece in self._pieces():
            if num_pending + len(piece) > CHUNK_BYTES:
                yield pb.Chunk(offset=offset, data=b"".join(pending))
                offset += num_pending
                pending, num_pending = [], 0
            pending.append(piece)
            num_pending += len(piece)
        if pending:
            yield pb.Chunk(offset=offset, data=b"".join(pending))

    def _pieces(self) -> Iterator[bytes]:
        """Yield blocks, large ones in parts, and make the checksums that the writer left out."""
        is_summed = bool(self._slab.checksums)
        for extent in self._slab.extents:
            digest = xxhash.xxh3_64()
            for start in range(0, extent.num_bytes, CHUNK_BYTES):
                num_bytes = min(CHUNK_BYTES, extent.num_bytes - start)
                piece = self._memory_of(extent.region_id).copy_out(extent, start, num_bytes)
                if not is_summed:
                    digest.update(piece)
                yield piece
            if not is_summed:
                self.checksums.append(digest.intdigest())
