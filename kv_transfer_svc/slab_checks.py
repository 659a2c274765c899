"""Checks that a sealed slab lies in the writer's region and matches the reserved layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from kv_transfer_svc.device_region import RegionMemory
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import InvalidRequest, KvCorrupt
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.layout import check_memory_kind
from tandem_runtime.kv.shared_region import SharedRegion

MAX_SLAB_BLOCKS = 4096
"""Their checksums travel in metadata, whose size gRPC limits."""


def block_part_bytes(group: pb.KvGroup, num_layers: int) -> int:
    """Return the bytes of a run of layers in one block; layers come first in a block's order."""
    return group.bytes_per_block * num_layers // len(group.layers)


def check_slab(slab: kv.Slab, layout: pb.KvLayout, region_id: str, memory: RegionMemory) -> None:
    """Raise InvalidRequest, with the field, unless the slab's extents are blocks of the region and the layout."""
    if slab.group >= len(layout.groups):
        raise InvalidRequest(f"slab {slab.index}: the layout has no group {slab.group}", field="slabs.group")
    group = layout.groups[slab.group]
    if not 0 < slab.num_layers <= len(group.layers):
        raise InvalidRequest(
            f"slab {slab.index} has {slab.num_layers} layers, its group has {len(group.layers)}",
            field="slabs.num_layers",
        )
    if slab.num_blocks == 0 or len(slab.extents) != slab.num_blocks:
        raise InvalidRequest(
            f"slab {slab.index} has {slab.num_blocks} blocks and {len(slab.extents)} extents", field="slabs.extents"
        )
    if slab.num_blocks > MAX_SLAB_BLOCKS:
        raise InvalidRequest(
            f"slab {slab.index} has {slab.num_blocks} blocks; seal at most {MAX_SLAB_BLOCKS} at once",
            field="slabs.num_blocks",
        )
    if slab.checksums and len(slab.checksums) != slab.num_blocks:
        raise InvalidRequest(f"slab {slab.index}: one checksum per block, or none", field="slabs.checksums")
    num_bytes, num_slots, total_bytes = block_part_bytes(group, slab.num_layers), memory.num_slots, memory.total_bytes
    kind = memory.kind
    for extent in slab.extents:  # hot: about 1,000 extents while decode waits
        if (
            extent.kind != kind
            or extent.region_id != region_id
            or extent.num_bytes != num_bytes
            or extent.slot >= num_slots
            or extent.offset + num_bytes > total_bytes
        ):
            _refuse_extent(slab.index, extent, region_id, num_bytes, kind)


def _refuse_extent(
    index: int, extent: pb.Extent, region_id: str, num_bytes: int, kind: pb.MemoryKind.ValueType
) -> NoReturn:
    if extent.kind != kind:
        check_memory_kind(extent)
        raise InvalidRequest(
            f"slab {index}: an extent in MEMORY_KIND_HOST, region {region_id} is in {pb.MemoryKind.Name(kind)}",
            field="extents.kind",
        )
    if extent.region_id != region_id:
        raise InvalidRequest(
            f"slab {index}: an extent in region {extent.region_id}, the handle reserved region {region_id}",
            field="extents.region_id",
        )
    if extent.num_bytes != num_bytes:
        raise InvalidRequest(
            f"slab {index}: an extent of {extent.num_bytes} bytes, the layout has {num_bytes}",
            field="extents.num_bytes",
        )
    raise InvalidRequest(
        f"slab {index}: slot {extent.slot} at byte {extent.offset} is outside region {region_id}",
        field="extents.offset",
    )


def verify_checksums(slabs: Sequence[kv.Slab], memory: SharedRegion, *, all_blocks: bool) -> None:
    """Compare checksums with the bytes in the region, for one block per slab or for all; raises KvCorrupt."""
    for slab in slabs:
        pairs = list(zip(slab.extents, slab.checksums, strict=False))
        for extent, checksum in pairs if all_blocks else pairs[:1]:
            if block_checksum(memory.copy_out(extent, 0, extent.num_bytes)) != checksum:
                raise KvCorrupt(f"slab {slab.index}: slot {extent.slot} does not match its checksum", field="checksums")
