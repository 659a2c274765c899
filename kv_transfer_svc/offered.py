"""What does a worker offer to the store, and how is it copied from under the worker's hands?"""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer_svc.blocks.keys import BlockKey
from kv_transfer_svc.region_table import RegionTable
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import InvalidRequest, KvCorrupt
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.layout import check_memory_kind
from tandem_runtime.kv.shared_region import SharedRegion

_MAX_BLOCKS_PER_CALL = 4096


def block_keys(layout_digest: bytes, group: int, hashes: Sequence[bytes]) -> list[BlockKey]:
    """Return the keys of a chain's blocks; raises InvalidRequest for too many, and for hashes of another length."""
    if len(hashes) > _MAX_BLOCKS_PER_CALL:
        raise InvalidRequest(f"{len(hashes)} blocks in one call; ask for {_MAX_BLOCKS_PER_CALL} at most")
    return [BlockKey(layout_digest, group, block_hash) for block_hash in hashes]


class Offered:
    """The blocks of one Publish, all of one region. Raises InvalidRequest for extents that are not in it."""

    def __init__(self, request: kv.PublishRequest, regions: RegionTable) -> None:
        digest, group = request.layout_digest, request.group
        self.keys = block_keys(digest, group, [block.block_hash for block in request.blocks])
        self.parent = BlockKey(digest, group, request.parent_hash) if request.parent_hash else None
        self._extents = [block.extent for block in request.blocks]
        self._checksums = [block.checksum for block in request.blocks]
        self.num_corrupt = 0
        if self._extents:
            self._memory = regions.lent(self._extents[0].region_id, request.incarnation).memory
            self._check(self._memory)

    @property
    def sizes(self) -> list[int]:
        return [extent.num_bytes for extent in self._extents]

    def copy(self, indices: Sequence[int], into: Sequence[memoryview]) -> list[int]:
        """Copy blocks one after the other and return their checksums; ends at the first that is not there any more.

        One that is not what its worker wrote is counted in `num_corrupt`, and ends the run too.

        A block without the one before it is of no use. Called in a thread.
        """
        checksums: list[int] = []
        for index, view in zip(indices, into, strict=True):
            extent = self._extents[index]
            try:
                content = self._memory.copy_out(extent, 0, extent.num_bytes)
            except (KvCorrupt, ValueError):  # reused since it was offered; or its owner is dead, its memory unmapped
                break
            view[:] = content
            checksum = block_checksum(content)
            if self._checksums[index] not in (0, checksum):
                self.num_corrupt += 1
                break
            checksums.append(checksum)
        return checksums

    def _check(self, memory: SharedRegion) -> None:
        region_id = self._extents[0].region_id
        for extent in self._extents:
            check_memory_kind(extent)
            is_inside = extent.slot < memory.num_slots and extent.offset + extent.num_bytes <= memory.generations_offset
            if extent.region_id != region_id or not is_inside or not extent.num_bytes:
                raise InvalidRequest(
                    f"a block of {extent.num_bytes} bytes at byte {extent.offset}, slot {extent.slot}, is not in "
                    f"region {region_id}",
                    field="blocks.extent",
                )
