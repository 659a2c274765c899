"""Computes and verifies checksums of KV blocks.

A block's checksum is computed once, from the bytes that others read, when the block is complete. It stays with the
block: at the worker that imports it, in the store, on disk and on other hosts. Every copy is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from tandem_engine.errors import CorruptBlock
from tandem_engine.execution.kv_cache import DeviceSlots, PagedKVCache, Slots
from tandem_engine.execution.regions import Bytes
from tandem_engine.execution.thread_pool import parallel_for
from tandem_engine.messages import ExtentRef


class BlockChecksums:
    """xxh3-64 of the blocks that one engine shows to others, and of those that it copies into its pool."""

    def __init__(self, cache: PagedKVCache, slots: Slots | DeviceSlots | None = None) -> None:
        """`slots`: the region that others read; None: the pool is the region."""
        self._cache = cache
        self._slots = slots or cache.slots
        self._made: dict[int, tuple[int, int]] = {}  # slot -> generation, checksum

    def of(self, slots: Sequence[int]) -> list[int]:
        """Return checksums of the region's slots, each computed from its bytes once per generation."""
        assert self._slots is not None, "a private pool shows its blocks in slots of a region"
        generations = [self._slots.generations[slot] for slot in slots]
        new = [
            (slot, generation)
            for slot, generation in zip(slots, generations, strict=True)
            if self._made.get(slot, (None, 0))[0] != generation
        ]
        checksums = _checksums([slot for slot, _ in new], self._slots.bytes_of, self._slots.bytes_per_slot)
        for (slot, generation), checksum in zip(new, checksums, strict=True):
            self._made[slot] = generation, checksum
        return [self._made[slot][1] for slot in slots]

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
