"""Are the bytes of a block those that were computed, wherever they have been since?

A block's checksum is made once, when the block is complete, and goes with it: to the worker that takes it over, to the
store, to disk and to other hosts. Whoever copies the block compares.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from engine.core import CorruptBlock
from engine.execution.kv_cache import PagedKVCache
from engine.messages import ExtentRef


class BlockChecksums:
    """xxh3-64 of the blocks of one pool."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._made: dict[int, tuple[int, int]] = {}  # block -> the generation it was made for, checksum

    def of(self, blocks: Sequence[int]) -> list[int]:
        """Return checksums of complete blocks, as their bytes were when first asked for."""
        return [self._checksum(block) for block in blocks]

    def verify(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> None:
        """Raise CorruptBlock if a block that was just copied is not what its extent says; those without say nothing."""
        for block, extent in zip(blocks, extents, strict=True):
            if extent.checksum and extent.checksum != self._compute(block):
                raise CorruptBlock(
                    f"slot {extent.slot} of region {extent.region_id} does not match its checksum: its bytes have "
                    "changed since they were written; compute it again"
                )

    def _checksum(self, block: int) -> int:
        generation = self._cache.generations[block]
        made_for, checksum = self._made.get(block, (None, 0))
        if made_for != generation:
            checksum = self._compute(block)
            self._made[block] = generation, checksum
        return checksum

    def _compute(self, block: int) -> int:
        return xxhash.xxh3_64_intdigest(self._cache.read_block(block))
