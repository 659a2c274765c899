"""Allocates memory for stored blocks from one region.

The region is cut into pages. An extent is a run of pages, and its slot is the first page. Freeing an extent raises the
generation of its slot once, before the memory is written again.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kv_transfer_svc.blocks.free_list import FreeList
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.kv.shared_region import SharedRegion

PAGE_BYTES = 4096


class Extent(msgspec.Struct, frozen=True, gc=False):
    """The place of a block. Slot and generation together identify one use of the memory."""

    offset: int
    num_bytes: int
    slot: int
    generation: int

    @property
    def held_bytes(self) -> int:
        """Bytes allocated for the extent, in whole pages."""
        return held_bytes(self.num_bytes)


class BlockAllocator:
    """Extents in a region that grows to `num_bytes`; its memory is taken from the machine as it is used.

    Raises InvalidRequest for too few bytes.
    """

    def __init__(self, num_bytes: int, initial_bytes: int | None = None) -> None:
        """`initial_bytes`: what may be used before the first `grow`; None: all."""
        num_pages = num_bytes // PAGE_BYTES
        if num_pages < 1:
            raise InvalidRequest(f"{num_bytes} bytes for stored blocks; give {PAGE_BYTES} at least", field="num_bytes")
        self.region = SharedRegion.reserve("tandem-kv-blocks", num_pages * PAGE_BYTES, num_pages)
        self._max_pages = num_pages
        self._pages = FreeList(num_pages if initial_bytes is None else min(num_pages, initial_bytes // PAGE_BYTES))

    @property
    def total_bytes(self) -> int:
        return self._pages.num_pages * PAGE_BYTES

    @property
    def free_bytes(self) -> int:
        return self._pages.num_free_pages * PAGE_BYTES

    def grow(self, total_bytes: int) -> None:
        """Use up to `total_bytes`, but no more than the region has; never shrinks."""
        self._pages.grow(min(self._max_pages, total_bytes // PAGE_BYTES))

    def allocate(self, num_bytes: int) -> Extent | None:
        """Return an extent, or None if no hole is large enough. Raises OSError if the machine's memory is short."""
        slot = self._pages.allocate(held_bytes(num_bytes) // PAGE_BYTES)
        if slot is None:
            return None
        self.region.take(slot * PAGE_BYTES + num_bytes)
        return Extent(slot * PAGE_BYTES, num_bytes, slot, self.region.generation(slot))

    def free(self, extent: Extent) -> None:
        assert self.region.generation(extent.slot) == extent.generation, f"{extent} is freed twice"
        self.region.next_generation(extent.slot)
        self._pages.free(extent.slot)

    def is_current(self, extent: Extent) -> bool:
        """Whether the memory still serves the use that `extent` names."""
        return self.region.generation(extent.slot) == extent.generation

    def window(self, slot: int, num_bytes: int, may_free: Callable[[int], bool]) -> list[int] | None:
        """Return the slots to free, `slot` among them, for one hole of `num_bytes`; None if they may not be freed."""
        return self._pages.window(slot, held_bytes(num_bytes) // PAGE_BYTES, may_free)

    def check(self) -> None:
        self._pages.check()

    def close(self) -> None:
        self.region.close()


def held_bytes(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole pages."""
    return max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
