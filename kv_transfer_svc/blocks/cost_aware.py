"""Evict what is worth least: uses so far x cost of computing it anew / bytes, with age.

GreedyDual-Size-Frequency: Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching
policy", HP Labs 1998. What depends on a block goes before it, so a leaf's own cost is all that its eviction costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer_svc.blocks.keys import BlockKey
from kv_transfer_svc.blocks.leaf_heap import Chains, LeafQueue
from kv_transfer_svc.blocks.policy import IsBusy


@dataclass(slots=True)
class _Worth:
    cost_per_byte: float
    num_uses: int = 1


class CostAwarePolicy:
    """Priority = clock at the last use + uses x cost / bytes; the clock is the last victim's priority.

    Implements EvictionPolicy.
    """

    def __init__(self) -> None:
        self._chains = Chains()
        self._queue = LeafQueue(self._chains)
        self._worths: dict[BlockKey, _Worth] = {}
        self._clock = 0.0

    def added(self, key: BlockKey, num_bytes: int, cost: float, parent: BlockKey | None) -> None:
        self._chains.add(key, parent)
        self._worths[key] = _Worth(cost / num_bytes)
        self._queue.put(key, self._priority_now(key))

    def used(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            if key in self._worths:
                self._worths[key].num_uses += 1
                self._queue.put(key, self._priority_now(key))

    def removed(self, key: BlockKey) -> None:
        if self._worths.pop(key, None) is not None:
            self._queue.discard(key)
            self._queue.offer(self._chains.remove(key))

    def victim(self, is_busy: IsBusy) -> BlockKey | None:
        key = self._queue.first(is_busy, self._priority_now)
        if key is not None:
            self._clock = max(self._clock, self._queue.priority(key))
        return key

    def _priority_now(self, key: BlockKey) -> float:
        worth = self._worths[key]
        return self._clock + worth.num_uses * worth.cost_per_byte
