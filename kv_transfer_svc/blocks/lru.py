"""Evict the chain's end that was not used for longest."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer_svc.blocks.keys import BlockKey
from kv_transfer_svc.blocks.leaf_heap import Chains, LeafQueue
from kv_transfer_svc.blocks.policy import IsBusy


class LruPolicy:
    """Least recently used, leaves first. Implements EvictionPolicy."""

    def __init__(self) -> None:
        self._chains = Chains()
        self._queue = LeafQueue(self._chains)
        self._tick = 0

    def added(self, key: BlockKey, num_bytes: int, cost: float, parent: BlockKey | None) -> None:
        self._tick += 1
        self._chains.add(key, parent)
        self._queue.put(key, self._tick)

    def used(self, keys: Sequence[BlockKey]) -> None:
        self._tick += 1
        for key in keys:
            if key in self._queue:
                self._queue.put(key, self._tick)

    def removed(self, key: BlockKey) -> None:
        if key in self._chains:
            self._queue.discard(key)
            self._queue.offer(self._chains.remove(key))

    def victim(self, is_busy: IsBusy) -> BlockKey | None:
        return self._queue.first(is_busy, lambda key: self._tick)
