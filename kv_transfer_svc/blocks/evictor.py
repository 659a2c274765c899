"""How is room made for a block, and at whose cost?

First the account's quota: over it, its own blocks go. Then memory: the least wanted block goes, and where it alone
leaves no hole that is long enough, its neighbours in memory with it. Blocks that `demote` copies first leave later:
what they will free is waited for, nothing more is evicted for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set

from kv_transfer_svc.blocks.allocator import Extent, Room, held_bytes
from kv_transfer_svc.blocks.block import Block, BlockState
from kv_transfer_svc.blocks.keys import BlockKey
from kv_transfer_svc.blocks.policy import IsBusy
from kv_transfer_svc.blocks.quotas import VictimOrder
from kv_transfer_svc.blocks.table import BlockTable

Demote = Callable[[BlockKey, Extent, int], bool]
"""Told of a block (its key, extent and checksum) before it goes. It must not call the store.

True: it is being copied, and `demoted` will be called. False: let it go now.
"""


class RoomMaker:
    """Takes room for new blocks, evicting others. Part of the store: it writes what the store owns."""

    def __init__(
        self,
        room: Room,
        table: BlockTable,
        order: VictimOrder,
        counters: Counter[str],
        demote: Demote | None,
        headroom_bytes: int,
    ) -> None:
        self._room = room
        self._table = table
        self._order = order
        self._counters = counters
        self._demote = demote
        self._headroom_bytes = headroom_bytes

    def take(self, num_bytes: int, account_tag: bytes, now: float, needed: Set[BlockKey | None]) -> Extent | None:
        """Return an extent, evicting what must go for it, but nothing of `needed`; None: not now."""
        if not self._fits_quota(held_bytes(num_bytes), account_tag, now, needed):
            self._counters["refused_over_quota"] += 1
            return None
        extent = self._room.take(num_bytes)
        if extent is None and self._make_room(num_bytes, now, needed):
            extent = self._room.take(num_bytes)
        return extent

    def keep_headroom(self, now: float, needed: Set[BlockKey | None]) -> None:
        """Evict until the headroom is free, or will be."""
        while self._room.free_bytes + self._table.held_bytes(BlockState.DEMOTING) < self._headroom_bytes:
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

    def _make_room(self, num_bytes: int, now: float, needed: Set[BlockKey | None]) -> bool:
        """Evict for a hole of `num_bytes`. False: nothing may go, or enough is on its way out already."""
        if self._table.held_bytes(BlockState.DEMOTING) >= held_bytes(num_bytes):
            return False
        is_busy = self._busy_or(needed)
        window: list[int] | None = None

        def leaves_no_hole(key: BlockKey) -> bool:
            nonlocal window
            if is_busy(key):
                return True
            window = self._room.window(
                self._table[key].extent.slot, num_bytes, lambda slot: not is_busy(self._table.at(slot).key)
            )
            return window is None

        if self._victim(leaves_no_hole) is None or window is None:
            return False
        for slot in window:
            self._evict(self._table.at(slot), now)
        return True

    def _victim(self, is_busy: IsBusy) -> BlockKey | None:
        # Where all is leased, looking through it would only take time.
        return self._order.victim(is_busy) if self._table.held_bytes(BlockState.SEALED) else None

    def _busy_or(self, needed: Set[BlockKey | None]) -> IsBusy:
        return lambda key: key in needed or not self._table[key].may_go

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
