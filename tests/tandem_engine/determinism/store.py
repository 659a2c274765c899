"""Provides a replacement of the KV service: a region that keeps blocks under their hashes and lends them."""

from __future__ import annotations

from tandem_engine.extents import ExtentRef, PrefixBlock
from tandem_engine.messages import FilledBlocks, MapRegion
from tests.tandem_engine.determinism.stage import Engine, Stage

_REGION_ID = "store"


class Store:
    """Copies every block that engines fill until it is full; evicts nothing."""

    def __init__(self, stage: Stage, num_blocks: int) -> None:
        self._cache = stage.empty_cache(num_blocks)
        self._slots: dict[tuple[str, int], int] = {}
        """By hash and group."""

    def keep(self, engine: Engine, filled: FilledBlocks) -> None:
        """Copy blocks that an engine has just reported."""
        for block_hash, slot, generation in zip(filled.hashes, filled.slots, filled.generations, strict=True):
            key = block_hash, filled.group
            if engine.slots.generations[slot] != generation:  # a later block has the slot
                continue
            if key not in self._slots and len(self._slots) < self._cache.num_blocks:
                self._slots[key] = len(self._slots)
                self._cache.write_blocks(self._slots[key], engine.slots.bytes_of(slot))

    def prefix(self, hashes: list[str]) -> list[PrefixBlock]:
        """Return the leading blocks of each group that are here."""
        found: list[PrefixBlock] = []
        size = self._cache.geometry.bytes_per_block
        for index, block_hash in enumerate(hashes):
            for group in range(self._cache.geometry.num_groups):
                if (slot := self._slots.get((block_hash, group))) is not None:
                    extent = ExtentRef(_REGION_ID, slot * size, size, slot, self._cache.generations[slot])
                    found.append(PrefixBlock(index, extent, group))
        return found

    def lend_to(self, reader: Engine) -> None:
        region = self._cache.region
        command = MapRegion(_REGION_ID, region.num_bytes, self._cache.num_blocks, self._cache.generations_offset)
        reader.core.handle(command, region.fd)
