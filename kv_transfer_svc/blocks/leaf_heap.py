"""Orders blocks by last use and names the least recently used leaf.

The blocks of one prompt form a chain, and a block without its predecessors is useless. Only a leaf, a block that no
stored block follows, is evicted, so a busy leaf keeps its whole chain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from kv_transfer_svc.blocks.block import BlockKey

IsBusy = Callable[[BlockKey], bool]

_COMPACT_ABOVE = 64


class LeafHeap:
    """Least recently used, leaves first. Every method takes O(log n) at most, averaged over calls.

    The heap is corrected lazily. An entry may be older than the block's last use; `victim` moves such an entry when it
    reaches the top. A use thus costs one assignment, not a push. A parent may be unknown, or come after its children.

    A new block enters the heap only when it could be the oldest. Most get a child before: the heap of a prompt of 8,192
    blocks would else have 8,191 entries that are no leaves, and one call of `victim` would remove them all.
    """

    def __init__(self) -> None:
        self._parents: dict[BlockKey, BlockKey | None] = {}
        self._num_children: dict[BlockKey, int] = {}
        self._last_use: dict[BlockKey, int] = {}
        self._heap: list[tuple[int, int, BlockKey]] = []  # tick of a use, number of the push, key
        self._queued: set[BlockKey] = set()
        """The keys in `_heap`; each is there once."""
        self._new: dict[BlockKey, int] = {}
        """Leaves that are not in `_heap` yet, with the tick of their addition; oldest first."""
        self._num_pushed = 0
        self._tick = 0

    def __len__(self) -> int:
        return len(self._last_use)

    def add(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Add a block that follows `parent` in its prompt."""
        self._tick += 1
        self._parents[key] = parent
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
            self._new.pop(parent, None)
        self._last_use[key] = self._tick
        if key not in self._num_children:
            self._new[key] = self._tick

    def use(self, keys: Sequence[BlockKey]) -> None:
        """Count one use of these blocks together; ignore unknown keys."""
        self._tick += 1
        for key in keys:
            if key in self._last_use:
                self._last_use[key] = self._tick
                if key not in self._new:
                    self._push_leaf(key)

    def remove(self, key: BlockKey) -> None:
        """Forget a block; ignore an unknown key."""
        if key not in self._last_use:
            return
        del self._last_use[key]
        self._new.pop(key, None)
        if len(self._heap) > 2 * len(self._last_use) + _COMPACT_ABOVE:
            self._compact()
        parent = self._parents.pop(key)
        if parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
                self._push_leaf(parent)

    def victim(self, is_busy: IsBusy) -> BlockKey | None:
        """Return the block to evict next, without removing it; None if every leaf is busy.

        Busy leaves before the victim count as used now, so the next call does not pass them again.
        """
        busy: list[BlockKey] = []
        while (key := self._top()) is not None and is_busy(key):
            busy.append(key)
            self._pop()
        for passed in busy:
            self._last_use[passed] = self._tick
            self._push_leaf(passed)
        return key

    def _top(self) -> BlockKey | None:
        """Bring the top of the heap in order and return its key."""
        while True:
            self._push_new()
            if not self._heap:
                return None
            queued_tick, _, key = self._heap[0]
            last_use = self._last_use.get(key)
            if last_use is not None and last_use == queued_tick and key not in self._num_children:
                return key
            self._pop()
            self._push_leaf(key)

    def _push_new(self) -> None:
        """Push the new blocks that were added before the heap's top was last used, at least one into an empty heap."""
        while self._new:
            key, added = next(iter(self._new.items()))
            if self._heap and self._heap[0][0] < added:
                return
            del self._new[key]
            self._push_leaf(key)

    def _push_leaf(self, key: BlockKey) -> None:
        """Push a key that is known, a leaf and not in the heap."""
        if key not in self._queued and key in self._last_use and key not in self._num_children:
            self._num_pushed += 1
            self._queued.add(key)
            heapq.heappush(self._heap, (self._last_use[key], self._num_pushed, key))

    def _pop(self) -> None:
        self._queued.remove(heapq.heappop(self._heap)[2])

    def _compact(self) -> None:
        """Rebuild the heap without the entries of removed blocks."""
        self._heap.clear()
        self._queued.clear()
        for key in self._last_use:
            if key not in self._new:
                self._push_leaf(key)
