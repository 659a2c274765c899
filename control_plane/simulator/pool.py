"""The blocks of one simulated pool or store, by hash id; the block least recently used leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Pool:
    """The KV pool of a worker: blocks that requests use, tokens that only one request has, and cached blocks."""

    def __init__(self, num_tokens: int, block_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.block_tokens = block_tokens
        self._users: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._private_tokens = 0.0

    @property
    def num_used(self) -> float:
        """Tokens that requests use."""
        return len(self._users) * self.block_tokens + self._private_tokens

    @property
    def num_cached(self) -> int:
        """Tokens that no request uses, and that a later prompt may find."""
        return len(self._cached) * self.block_tokens

    @property
    def num_available(self) -> float:
        """Tokens that a request can get, cached ones included."""
        return self.num_tokens - self.num_used

    def num_found(self, block_ids: Sequence[int]) -> int:
        """Return how many leading blocks are here."""
        for place, block_id in enumerate(block_ids):
            if block_id not in self._users and block_id not in self._cached:
                return place
        return len(block_ids)

    def has_room(self, block_ids: Sequence[int], num_private: float) -> bool:
        """Return whether a request gets its blocks, counting those that others use once."""
        num_new = sum(block_id not in self._users for block_id in block_ids)
        return num_new * self.block_tokens + num_private <= self.num_available

    def take(self, block_ids: Sequence[int], num_private: float) -> None:
        """Let a request use blocks; cached blocks of others leave if they must."""
        for block_id in block_ids:
            self._users[block_id] = self._users.get(block_id, 0) + 1
            self._cached.pop(block_id, None)
        self.grow(num_private)

    def grow(self, num_private: float) -> None:
        """Add tokens that are no one else's."""
        self._private_tokens += num_private
        while self._cached and self.num_used + self.num_cached > self.num_tokens:
            self._cached.popitem(last=False)

    def release(self, block_ids: Sequence[int], num_private: float) -> None:
        """A request is over: its full blocks stay cached. The last ones leave first: they need those before them."""
        for block_id in reversed(block_ids):
            self._users[block_id] -= 1
            if not self._users[block_id]:
                del self._users[block_id]
                self._cached[block_id] = None
        self._private_tokens -= num_private
        self.grow(0)


class Store:
    """The block store of a host."""

    def __init__(self, num_tokens: int, block_tokens: int) -> None:
        self._max_blocks = num_tokens // block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def num_found(self, block_ids: Sequence[int], first: int) -> int:
        """Return how many blocks from block `first` on are here, in a row; they are used now."""
        num_found = 0
        for block_id in block_ids[first:]:
            if block_id not in self._blocks:
                break
            num_found += 1
        for block_id in reversed(block_ids[: first + num_found]):
            if block_id in self._blocks:
                self._blocks.move_to_end(block_id)
        return num_found

    def put(self, block_ids: Sequence[int]) -> None:
        """Keep a prompt's blocks; others leave if they must."""
        for block_id in reversed(block_ids):
            self._blocks[block_id] = None
            self._blocks.move_to_end(block_id)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
