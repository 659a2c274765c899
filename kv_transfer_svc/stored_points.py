"""Finds out which sample points the store has, in memory or on disk.

Publish and Load state where their blocks lie in the chain: only they say which blocks are sample points. A block that
leaves one tier may be in the other: the sweep looks once for each point that something happened to.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from kv_transfer_svc.blocks.block import BlockKey
from kv_transfer_svc.host_points import STORE, HostPoints
from tandem_engine.scheduling.sample_points import NUM_KEY_BYTES, is_sample_point


class StoredPoints:
    """Reports the store's points to `points`. On the event loop, except for `on_removed`."""

    def __init__(self, points: HostPoints, is_stored: Callable[[BlockKey], bool]) -> None:
        self._points = points
        self._is_stored = is_stored
        self._marked: dict[bytes, BlockKey] = {}
        """The sample points that the store has, or may have, by layout digest and hash."""
        self._reported: set[BlockKey] = set()
        self._num_reported: Counter[bytes] = Counter()
        """Blocks by point: of several layouts, blocks may have one key."""
        self._touched: deque[bytes] = deque()

    def mark(self, keys: Sequence[BlockKey], first_block: int, tokens_per_block: int) -> None:
        """Note which of a chain's blocks are sample points; the first one is block `first_block` of the chain.

        `tokens_per_block` 0: the caller did not state the place. Groups other than 0 lack the beginning of the chain.
        """
        if not tokens_per_block or not keys or keys[0].group:
            return
        for key, num_tokens in zip(keys, _ends(first_block, tokens_per_block, len(keys)), strict=True):
            if is_sample_point(num_tokens):
                name = key.layout_digest + key.block_hash
                self._marked[name] = key
                self._touched.append(name)

    def on_removed(self, layout_digest: bytes, block_hash: bytes) -> None:
        """A tier no longer has a block; called in any thread."""
        name = layout_digest + block_hash
        if name in self._marked:
            self._touched.append(name)

    def sweep(self) -> None:
        """Report what has changed since the last sweep."""
        stored: list[bytes] = []
        evicted: list[bytes] = []
        for name in dict.fromkeys(self._touched.popleft() for _ in range(len(self._touched))):
            key = self._marked.get(name)
            if key is None:
                continue
            point = key.block_hash[:NUM_KEY_BYTES]
            if self._is_stored(key):
                if key not in self._reported:
                    self._reported.add(key)
                    self._num_reported[point] += 1
                    stored.append(point)
                continue
            del self._marked[name]
            if key in self._reported:
                self._reported.discard(key)
                self._num_reported[point] -= 1
                if not self._num_reported[point]:
                    del self._num_reported[point]
                    evicted.append(point)
        self._points.change(STORE, stored, evicted)


def _ends(first_block: int, tokens_per_block: int, count: int) -> range:
    """Return the number of tokens up to the end of each of `count` blocks of a chain."""
    return range((first_block + 1) * tokens_per_block, (first_block + count + 1) * tokens_per_block, tokens_per_block)
