"""Computes and verifies checksums of KV blocks.

A block's checksum is computed once, when the block is complete, and stays with it: at the worker that imports it, in
the store, on disk and on other hosts. Every copy is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from tandem_engine.core import CorruptBlock
from tandem_engine.execution.kv_cache import PagedKVCache
from tandem_engine.execution.regions import Bytes
from tandem_engine.execution.thread_pool import parallel_for
from tandem_engine.messages import ExtentRef


class BlockChecksums:
    """xxh3-64 of the blocks of one pool."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._made: dict[int, tuple[int, int]] = {}  # block -> generation, checksum

    def of(self, blocks: Sequence[int]) -> list[int]:
        """Return checksums of complete blocks, computed from their bytes at the first call."""
        generations = [self._cache.generations[block] for block in blocks]
        new = [
            (block, generation)
            for block, generation in zip(blocks, generations, strict=True)
            if self._made.get(block, (None, 0))[0] != generation
        ]
        checksums = _checksums([block for block, _ in new], self._cache.bytes_of, self._cache.geometry.bytes_per_block)
        for (block, generation), checksum in zip(new, checksums, strict=True):
            self._made[block] = generation, checksum
        return [self._made[block][1] for block in blocks]

    def verify(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> None:
        """Raise CorruptBlock if a block that was just copied differs from its extent's checksum, if there is one."""
        _verify(blocks, extents, self._cache.bytes_of)

    def verify_copies(self, copies: Sequence[Bytes], extents: Sequence[ExtentRef]) -> None:
        """Raise CorruptBlock if the bytes of a block that were just copied differ from its extent's checksum."""
        _verify(range(len(copies)), extents, copies.__getitem__)


def _verify(items: Sequence[int], extents: Sequence[ExtentRef], bytes_of: Callable[[int], Bytes]) -> None:
    known = [(item, extent) for item, extent in zip(items, extents, strict=True) if extent.checksum]
    item_bytes = extents[0].num_bytes if extents else 0
    for (_, extent), checksum in zip(known, _checksums([item for item, _ in known], bytes_of, item_bytes), strict=True):
        if extent.checksum != checksum:
            raise CorruptBlock(
                f"slot {extent.slot} of region {extent.region_id} does not match its checksum: its bytes have "
                "changed since they were written; compute it again"
            )


def _checksums(items: Sequence[int], bytes_of: Callable[[int], Bytes], item_bytes: int) -> list[int]:
    checksums = [0] * len(items)

    def compute(start: int, end: int) -> None:
        for index in range(start, end):
            checksums[index] = xxhash.xxh3_64_intdigest(bytes_of(items[index]).data)

    parallel_for(compute, len(items), item_bytes)
    return checksums
