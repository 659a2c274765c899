"""How do a slab's bytes leave: as a stream of gRPC chunks, or from memory straight to a socket?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from kv_transfer_svc.record import Record
from kv_transfer_svc.transport.source import BlockSource, Source
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.shared_region import SharedRegion


def slab_source(slab: kv.Slab, record: Record, memory_of: Callable[[str], SharedRegion]) -> BlockSource:
    """Return a slab's blocks, to be sent once. Checksums that its writer left out are made at the first reading."""
    blocks = range(slab.first_block, slab.first_block + slab.num_blocks)
    made = [record.checksums[slab.index, block] for block in blocks if (slab.index, block) in record.checksums]
    return BlockSource(slab.extents, memory_of, slab.checksums or made, partial(_keep, record, slab.index, blocks))


def source_chunks(source: Source) -> Iterator[pb.Chunk]:
    """Yield a source's bytes in messages of at most 1 MiB; its verdict is to be asked for after the last one."""
    offset = 0
    for group in source:
        data = b"".join(group)
        yield pb.Chunk(offset=offset, data=data)
        offset += len(data)


def _keep(record: Record, slab_index: int, blocks: range, checksums: list[int]) -> None:
    """Called by the thread that sent them."""
    record.checksums.update({(slab_index, block): each for block, each in zip(blocks, checksums, strict=True)})
