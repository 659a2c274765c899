"""Evict what was not used again soon after it came, and only then the rest in its order of arrival.

S3-FIFO: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, section 4. Two departures, because
only leaves are evicted here: a block moves from the small queue to the main one at its second use rather than when it
comes to the end (the beginning of a prompt would never come there, and its bytes would make the small queue seem full),
and the queues are sized by bytes, of what the policy knows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kv_transfer_svc.blocks.keys import BlockKey
from kv_transfer_svc.blocks.leaf_heap import Chains, LeafQueue
from kv_transfer_svc.blocks.policy import IsBusy

_SMALL_SHARE = 0.1
_MAX_FREQUENCY = 3
_PROMOTE_AT = 2


class S3FifoPolicy:
    """A small, a main and a ghost queue. Implements EvictionPolicy."""

    def __init__(self) -> None:
        self._chains = Chains()
        self._small = LeafQueue(self._chains)
        self._main = LeafQueue(self._chains)
        self._ghost: OrderedDict[BlockKey, None] = OrderedDict()
        """Keys that went from the small queue: if they come back, that was too early."""
        self._frequencies: dict[BlockKey, int] = {}
        self._num_bytes: dict[BlockKey, int] = {}
        self._small_bytes = 0
        self._total_bytes = 0
        self._tick = 0

    def added(self, key: BlockKey, num_bytes: int, cost: float, parent: BlockKey | None) -> None:
        self._chains.add(key, parent)
        self._frequencies[key] = 0
        self._num_bytes[key] = num_bytes
        self._total_bytes += num_bytes
        if key in self._ghost:
            del self._ghost[key]
            self._main.put(key, self._now())
        else:
            self._small_bytes += num_bytes
            self._small.put(key, self._now())

    def used(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            if key not in self._chains:
                continue
            self._frequencies[key] = min(_MAX_FREQUENCY, self._frequencies[key] + 1)
            if key in self._small and self._frequencies[key] >= _PROMOTE_AT:
                self._leave_small(key)
                self._frequencies[key] = 0
                self._main.put(key, self._now())

    def removed(self, key: BlockKey) -> None:
        if key not in self._chains:
            return
        if key in self._small:
            self._leave_small(key)
            self._remember(key)
        self._main.discard(key)
        self._total_bytes -= self._num_bytes.pop(key)
        del self._frequencies[key]
        parent = self._chains.remove(key)
        self._small.offer(parent)
        self._main.offer(parent)

    def victim(self, is_busy: IsBusy) -> BlockKey | None:
        if self._small_bytes >= _SMALL_SHARE * self._total_bytes:
            return self._small_victim(is_busy) or self._main_victim(is_busy)
        return self._main_victim(is_busy) or self._small_victim(is_busy)

    def _small_victim(self, is_busy: IsBusy) -> BlockKey | None:
        return self._small.first(is_busy, lambda key: self._tick)

    def _main_victim(self, is_busy: IsBusy) -> BlockKey | None:
        while (key := self._main.first(is_busy, lambda key: self._tick)) is not None and self._frequencies[key]:
            self._frequencies[key] -= 1
            self._main.put(key, self._now())
        return key

    def _now(self) -> int:
        self._tick += 1
        return self._tick

    def _leave_small(self, key: BlockKey) -> None:
        self._small.discard(key)
        self._small_bytes -= self._num_bytes[key]

    def _remember(self, key: BlockKey) -> None:
        self._ghost[key] = None
        while len(self._ghost) > len(self._chains):
            self._ghost.popitem(last=False)
