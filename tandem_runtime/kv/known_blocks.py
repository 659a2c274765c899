"""Tells from shared memory, without a call, that a host's store does not have a block.

The KV service keeps two tables of counters in shared memory, one for DRAM and one for disk: a byte per bucket of block
hashes. Every block is counted in and out. Workers of the host map the tables read-only. Two zeroes mean that the store
did not have the block a moment ago; the worker then saves the call, which would delay the first token.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tandem_runtime.kv.shared_region import SharedRegion

REGION_ID = "known-blocks"
_NUM_BUCKETS = 1 << 20
_FULL = 255
"""A bucket at this count stays there: its blocks are possibly known from then on."""


class BlockCounters:
    """The counters of one tier. One thread writes at a time. Counts are exact, except in full buckets."""

    def __init__(self, table: memoryview) -> None:
        self._table = table
        self.on_removed: Callable[[bytes, bytes], None] | None = None
        """Called with layout digest and hash after a block was counted out, in the thread that counts; owner only."""

    def may_have(self, layout_digest: bytes, block_hash: bytes) -> bool:
        return self._table[_bucket(layout_digest, block_hash)] > 0

    def add(self, layout_digest: bytes, block_hash: bytes) -> None:
        """Count a block in; owner only."""
        bucket = _bucket(layout_digest, block_hash)
        if self._table[bucket] < _FULL:
            self._table[bucket] += 1

    def remove(self, layout_digest: bytes, block_hash: bytes) -> None:
        """Count out a block that was counted in; owner only."""
        bucket = _bucket(layout_digest, block_hash)
        if 0 < self._table[bucket] < _FULL:
            self._table[bucket] -= 1
        if self.on_removed is not None:
            self.on_removed(layout_digest, block_hash)

    def release(self) -> None:
        self._table.release()


class KnownBlocks:
    """Both tables: `create` for the service, `map_read_only` for a worker."""

    def __init__(self, region: SharedRegion) -> None:
        if region.total_bytes < 2 * _NUM_BUCKETS:
            region.close()
            raise ValueError(f"a table of known blocks has {2 * _NUM_BUCKETS:,} bytes, this one {region.total_bytes:,}")
        self.region = region
        self.memory = BlockCounters(region.view(0, _NUM_BUCKETS))
        self.disk = BlockCounters(region.view(_NUM_BUCKETS, _NUM_BUCKETS))

    @classmethod
    def create(cls) -> KnownBlocks:
        return cls(SharedRegion.create("tandem-known-blocks", 2 * _NUM_BUCKETS, 1))

    @classmethod
    def map_read_only(cls, fd: int, num_slots: int, generations_offset: int) -> KnownBlocks:
        """Map the service's tables; `fd` stays the caller's. Raises InvalidRequest, OSError."""
        return cls(SharedRegion.map_read_only(os.dup(fd), num_slots, generations_offset))

    def may_have(self, layout_digest: bytes, block_hash: bytes) -> bool:
        """Return False if the store did not have this block a moment ago."""
        return self.memory.may_have(layout_digest, block_hash) or self.disk.may_have(layout_digest, block_hash)

    def close(self) -> None:
        self.memory.release()
        self.disk.release()
        self.region.close()


def _bucket(layout_digest: bytes, block_hash: bytes) -> int:
    """Return the bucket of a block. Keys are digests, so a sum of some of their bits is spread evenly."""
    return (int.from_bytes(layout_digest[:8], "little") + int.from_bytes(block_hash[:8], "little")) % _NUM_BUCKETS
