"""Which blocks have nothing after them, and which of those has the lowest priority?"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kv_transfer_svc.blocks.keys import BlockKey
from kv_transfer_svc.blocks.policy import IsBusy

_COMPACT_ABOVE = 64


class Chains:
    """Who follows whom. A parent may be unknown, or come after its children."""

    def __init__(self) -> None:
        self._parents: dict[BlockKey, BlockKey | None] = {}
        self._num_children: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._parents

    def add(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._parents[key] = parent
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def remove(self, key: BlockKey) -> BlockKey | None:
        """Forget a block and return its parent, which may be a leaf now."""
        parent = self._parents.pop(key)
        if parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
        return parent

    def is_leaf(self, key: BlockKey) -> bool:
        return key not in self._num_children


class LeafQueue:
    """Members by priority, of which only the leaves are offered.

    A heap that is put right late: each leaf has an entry at or below its priority, and an entry that turns out to be
    too low is moved when it comes to the top. A use thus costs one assignment, not a push.
    """

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._priorities: dict[BlockKey, float] = {}
        self._heap: list[tuple[float, int, BlockKey]] = []
        self._queued: dict[BlockKey, float] = {}
        """The priority of the entry that counts; others of the same key are left over."""
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._priorities)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._priorities

    def priority(self, key: BlockKey) -> float:
        return self._priorities[key]

    def put(self, key: BlockKey, priority: float) -> None:
        """Add a member, or set its priority anew."""
        self._priorities[key] = priority
        if priority < self._queued.get(key, float("inf")):
            self.offer(key)

    def discard(self, key: BlockKey) -> None:
        self._priorities.pop(key, None)
        if len(self._heap) > 2 * len(self._priorities) + _COMPACT_ABOVE:
            self._compact()

    def offer(self, key: BlockKey | None) -> None:
        """See to it that a key has an entry, if it is a member and a leaf: it may have become one."""
        priority = self._priorities.get(key) if key is not None else None
        if key is None or priority is None or not self._chains.is_leaf(key):
            return
        if priority < self._queued.get(key, float("inf")):
            self._push(key, priority)

    def first(self, is_busy: IsBusy, renewed: Callable[[BlockKey], float]) -> BlockKey | None:
        """Return the leaf of lowest priority that is not busy; busy ones below it get the priority `renewed`."""
        busy: list[BlockKey] = []
        while (key := self._top()) is not None and is_busy(key):
            busy.append(key)
            self._pop()
        for passed in busy:
            self.put(passed, max(self._priorities[passed], renewed(passed)))
        return key

    def _top(self) -> BlockKey | None:
        """Bring the heap's top in order and return its key."""
        while self._heap:
            queued, _, key = self._heap[0]
            priority = self._priorities.get(key)
            if queued != self._queued.get(key):
                heapq.heappop(self._heap)
            elif priority is None or not self._chains.is_leaf(key):
                self._pop()
            elif queued < priority:
                self._pop()
                self._push(key, priority)
            else:
                return key
        return None

    def _pop(self) -> None:
        del self._queued[heapq.heappop(self._heap)[2]]

    def _push(self, key: BlockKey, priority: float) -> None:
        self._num_pushed += 1
        self._queued[key] = priority
        heapq.heappush(self._heap, (priority, self._num_pushed, key))

    def _compact(self) -> None:
        """Build the heap anew, without what is left over from members that went."""
        leaves = [(priority, key) for key, priority in self._priorities.items() if self._chains.is_leaf(key)]
        self._heap.clear()
        self._queued.clear()
        for priority, key in leaves:
            self._push(key, priority)
