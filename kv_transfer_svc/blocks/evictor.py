"""Takes memory for new blocks and evicts other blocks for them.

1. Quota: an account over its quota evicts its own blocks.
2. Memory: the least recently used block is evicted. If its hole is too short, its neighbours in memory are evicted too.

A block that `demote` copies to disk first frees its memory later. The evictor waits for that memory and evicts nothing
more for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set

from kv_transfer_svc.blocks.allocator import BlockAllocator, Extent, held_bytes
from kv_transfer_svc.blocks.block import Block, BlockKey, BlockState
from kv_transfer_svc.blocks.leaf_heap import IsBusy
from kv_transfer_svc.blocks.quotas import EvictionOrder
from kv_transfer_svc.blocks.table import BlockTable

Demote = Callable[[BlockKey, Extent, int], bool]
"""Called with a block's key, extent and checksum before its eviction. Must not call the store.

True: the block is being copied, and `demoted` will be called. False: the block is removed now.
"""


class Evictor:
    """Allocates extents and evicts blocks. Part of the store: changes what the store owns."""

    def __init__(
        self,
        allocator: BlockAllocator,
        table: BlockTable,
        order: EvictionOrder,
        counters: Counter[str],
        demote: Demote | None,
        headroom_bytes: int,
    ) -> None:
        self._allocator = allocator
        self._table = table
        self._order = order
        self._counters = counters
        self._demote = demote
        self.headroom_bytes = headroom_bytes

    def allocate(self, num_bytes: int, account_tag: bytes, now: float, needed: Set[BlockKey | None]) -> Extent | None:
        """Return an extent, evicting other blocks but none of `needed`; None: not now."""
        if not self._fits_quota(held_bytes(num_bytes), account_tag, now, needed):
            self._counters["refused_over_quota"] += 1
            return None
        extent = self._allocator.allocate(num_bytes)
        if extent is None and self._evict_for_hole(num_bytes, now, needed):
            extent = self._allocator.allocate(num_bytes)
        return extent

    def keep_headroom(self, now: float, needed: Set[BlockKey | None]) -> None:
        """Evict until the headroom is free, or is being freed."""
        while self._allocator.free_bytes + self._table.held_bytes(BlockState.DEMOTING) < self.headroom_bytes:
            key = self._victim(self._busy_or(needed))
            if key is None:
                return
            self._evict(self._table[key], now)

    def _fits_quota(self, num_bytes: int, account_tag: bytes, now: float, needed: Set[BlockKey | None]) -> bool:
        if self._order.is_too_large(account_tag, num_bytes):
            return False
        while self._order.excess_bytes(account_tag, num_bytes):
            key = self._order.own_victim(account_tag, self._busy_or(needed))
            if key is None:
                return False
            self._evict(self._table[key], now)
        return True

    def _evict_for_hole(self, num_bytes: int, now: float, needed: Set[BlockKey | None]) -> bool:
        """Evict for a hole of `num_bytes`. False: no block may be evicted, or enough memory is being freed already."""
        if self._table.held_bytes(BlockState.DEMOTING) >= held_bytes(num_bytes):
            return False
        is_busy = self._busy_or(needed)
        window: list[int] | None = None

        def leaves_no_hole(key: BlockKey) -> bool:
            nonlocal window
            if is_busy(key):
                return True
            window = self._allocator.window(
                self._table[key].extent.slot, num_bytes, lambda slot: not is_busy(self._table.at(slot).key)
            )
            return window is None

        if self._victim(leaves_no_hole) is None or window is None:
            return False
        for slot in window:
            self._evict(self._table.at(slot), now)
        return True

    def _victim(self, is_busy: IsBusy) -> BlockKey | None:
        # A search is pointless where every block is leased.
        return self._order.victim(is_busy) if self._table.held_bytes(BlockState.SEALED) else None

    def _busy_or(self, needed: Set[BlockKey | None]) -> IsBusy:
        return lambda key: key in needed or not self._table[key].is_evictable

    def _evict(self, block: Block, now: float) -> None:
        is_copied = self._demote is not None and self._demote(block.key, block.extent, block.checksum)
        self._order.remove(block)
        self._counters["evictions"] += 1
        if not is_copied:
            self._table.remove(block)
            return
        self._counters["demotions"] += 1
        block.since = now
        self._table.change(block, BlockState.DEMOTING)
