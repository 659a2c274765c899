"""Where in memory do stored blocks lie?

One region of the service's own, cut into pages. An extent is a run of pages and its slot is the first of them; giving
it back raises the slot's generation, once, before anything else is written there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer_svc.blocks.free_list import PageRuns
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.kv.shared_region import SharedRegion

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a block lies. Slot and generation together name one use of the memory and no other."""

    offset: int
    num_bytes: int
    slot: int
    generation: int

    @property
    def held_bytes(self) -> int:
        """Whole pages: what it takes from the room."""
        return held_bytes(self.num_bytes)


class Room:
    """Extents in a region of `num_bytes`, taken from the machine at once. Raises InvalidRequest for too few."""

    def __init__(self, num_bytes: int) -> None:
        num_pages = num_bytes // PAGE_BYTES
        if num_pages < 1:
            raise InvalidRequest(f"{num_bytes} bytes for stored blocks; give {PAGE_BYTES} at least", field="num_bytes")
        self.region = SharedRegion.create("tandem-kv-blocks", num_pages * PAGE_BYTES, num_pages)
        self._pages = PageRuns(num_pages)

    @property
    def total_bytes(self) -> int:
        return self._pages.num_pages * PAGE_BYTES

    @property
    def free_bytes(self) -> int:
        return self._pages.num_free_pages * PAGE_BYTES

    def take(self, num_bytes: int) -> Extent | None:
        """Return an extent, or None if no hole is that large."""
        slot = self._pages.take(held_bytes(num_bytes) // PAGE_BYTES)
        if slot is None:
            return None
        return Extent(slot * PAGE_BYTES, num_bytes, slot, self.region.generation(slot))

    def give_back(self, extent: Extent) -> None:
        assert self.region.generation(extent.slot) == extent.generation, f"{extent} is given back twice"
        self.region.next_generation(extent.slot)
        self._pages.give_back(extent.slot)

    def is_current(self, extent: Extent) -> bool:
        """Whether the memory is still in the use that `extent` names."""
        return self.region.generation(extent.slot) == extent.generation

    def window(self, slot: int, num_bytes: int, may_go: Callable[[int], bool]) -> list[int] | None:
        """Return the slots, `slot` among them, that must go for `num_bytes` in one piece; None: they may not."""
        return self._pages.window(slot, held_bytes(num_bytes) // PAGE_BYTES, may_go)

    def check(self) -> None:
        self._pages.check()

    def close(self) -> None:
        self.region.close()


def held_bytes(num_bytes: int) -> int:
    """Return `num_bytes` in whole pages."""
    return max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
