"""The bytes of a reply, read from a region's memory without a copy on the way to the socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from kv_transfer_svc.handle_record import HandleRecord
from kv_transfer_svc.transport.pieces import RunningChecksums, groups
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.shared_region import SharedRegion

MAX_PROBE_BYTES = 16 << 20


class Source(Protocol):
    """The bytes of one reply. Created on the event loop, read once, in a thread or on the loop."""

    num_bytes: int

    def __iter__(self) -> Iterator[list[memoryview]]:
        """Yield the bytes, in groups of at most 1 MiB."""

    def finish(self) -> list[int]:
        """Return each block's checksum after the last byte was sent; raises KvCorrupt if a slot was reused before."""


class BlockSource:
    """Blocks of regions whose slots may be reused at any time.

    `checksums` are used if all are known. Otherwise they are computed on the way and passed to `keep`.
    """

    def __init__(
        self,
        extents: Sequence[pb.Extent],
        memory_of: Callable[[str], SharedRegion],
        checksums: Sequence[int] = (),
        keep: Callable[[list[int]], None] = lambda computed: None,
    ) -> None:
        self._extents = extents
        self._memories = {region_id: memory_of(region_id) for region_id in {each.region_id for each in extents}}
        # These keep the regions mapped. The views of blocks are made by the reader: thousands would stop the loop.
        self._regions = {region_id: memory.view(0, memory.total_bytes) for region_id, memory in self._memories.items()}
        self._known = list(checksums) if len(checksums) == len(extents) else None
        self._computed: list[int] = []
        self._keep = keep
        self.num_bytes = sum(extent.num_bytes for extent in extents)

    def __iter__(self) -> Iterator[list[memoryview]]:
        places = ((self._regions[extent.region_id], extent.offset, extent.num_bytes) for extent in self._extents)
        blocks = [region[offset : offset + num_bytes] for region, offset, num_bytes in places]
        if self._known is not None:
            yield from groups(blocks)
            return
        checksums = RunningChecksums(blocks)
        self._computed = checksums.values
        for group in groups(blocks):
            checksums.add(group)
            yield group

    def finish(self) -> list[int]:
        for extent in self._extents:
            self._memories[extent.region_id].check_generation(extent)
        if self._known is not None:
            return self._known
        self._keep(self._computed)
        return self._computed


class ProbeSource:
    """The reply to a probe: zeros."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = min(num_bytes, MAX_PROBE_BYTES)
        self._blocks = [memoryview(bytes(self.num_bytes))] if self.num_bytes else []
        self._computed = RunningChecksums(self._blocks)

    def __iter__(self) -> Iterator[list[memoryview]]:
        for group in groups(self._blocks):
            self._computed.add(group)
            yield group

    def finish(self) -> list[int]:
        return self._computed.values


def slab_source(slab: kv.Slab, record: HandleRecord, memory_of: Callable[[str], SharedRegion]) -> BlockSource:
    """Return a slab's blocks, to be sent once. Checksums missing from the seal are computed at the first read."""
    blocks = range(slab.first_block, slab.first_block + slab.num_blocks)
    computed = [record.checksums[slab.index, block] for block in blocks if (slab.index, block) in record.checksums]
    return BlockSource(slab.extents, memory_of, slab.checksums or computed, partial(_keep, record, slab.index, blocks))


def source_chunks(source: Source) -> Iterator[pb.Chunk]:
    """Yield a source's bytes in messages of at most 1 MiB; call `finish` after the last one."""
    offset = 0
    for group in source:
        data = b"".join(group)
        yield pb.Chunk(offset=offset, data=data)
        offset += len(data)


def _keep(record: HandleRecord, slab_index: int, blocks: range, checksums: list[int]) -> None:
    """Keep computed checksums; called by the thread that sent the blocks."""
    record.checksums.update({(slab_index, block): each for block, each in zip(blocks, checksums, strict=True)})
