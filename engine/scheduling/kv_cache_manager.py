"""Which blocks hold the KV of a request's tokens?

block_table   [ found in the prefix cache | computed or imported here                  | reserved ]
tokens         0 ... num_found_blocks*size  ...                    num_computed_tokens
written        never                        once, then registered when full

Where every layer has a window, blocks that lie behind it are dropped: given back as soon as they do, and not even
looked for in the prefix cache. Not those of a prefill: it hands over the whole prompt.

block_table   [ dropped            |  the window  ...                      num_computed_tokens ]
               num_dropped_blocks
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.messages import FilledBlocks
from engine.scheduling.block_hash import BlockHash, next_block_hash
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.request import Request


class KVCacheManager:
    """The only writer of block tables. Methods that return False mean "not now" and change nothing."""

    def __init__(self, pool: BlockPool, window: int | None = None) -> None:
        self.pool = pool
        self._window = window

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def admit(self, request: Request, num_tokens: int, max_found_tokens: int, num_reserve_blocks: int = 0) -> bool:
        """Give a request without blocks room for `num_tokens`, the leading ones from the prefix cache.

        At most `max_found_tokens` are looked for, in full blocks; found ones count as computed. False if fewer than
        `num_reserve_blocks` would be left for others.
        """
        assert not request.block_table, f"{request.request_id} has blocks already"
        num_dropped, found = self._find(request, max_found_tokens)
        num_found = num_dropped + len(found)
        num_new_blocks = self.num_blocks_for(num_tokens) - num_found
        num_taken_blocks = num_new_blocks + self.pool.num_unused(found)
        if num_taken_blocks + num_reserve_blocks > self.pool.num_available:
            return False
        self.pool.share(found)
        new = self.pool.allocate(num_new_blocks)
        assert new is not None, "the blocks were counted a moment ago"
        request.block_table = [*[0] * num_dropped, *found, *new]
        request.num_dropped_blocks = num_dropped
        request.num_found_blocks = request.num_registered_blocks = num_found
        request.num_computed_tokens = num_found * self.pool.block_size
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` of a request."""
        num_missing = self.num_blocks_for(num_tokens) - len(request.block_table)
        if num_missing <= 0:
            return True
        new = self.pool.allocate(num_missing)
        if new is None:
            return False
        request.block_table.extend(new)
        return True

    def room_for_drafts(self, request: Request, num_drafts: int, num_reserve_blocks: int) -> int:
        """Return how many of so many drafts have slots behind a request's tokens, having made room if there is any.

        New blocks are taken only while `num_reserve_blocks` are left for others.
        """
        num_missing = self.num_blocks_for(request.num_tokens + num_drafts) - len(request.block_table)
        if num_missing > 0 and num_missing + num_reserve_blocks <= self.pool.num_available:
            self.grow(request, request.num_tokens + num_drafts)
        return min(num_drafts, len(request.block_table) * self.pool.block_size - request.num_tokens)

    def drop_behind_window(self, request: Request) -> None:
        """Give back the blocks that no token from `num_computed_tokens` on attends to."""
        if self._window is None or request.mode == "prefill":
            return
        first, end = (
            request.num_dropped_blocks,
            (request.num_computed_tokens - self._window + 1) // self.pool.block_size,
        )
        if end > first:
            self.pool.free(request.block_table[first:end])
            request.num_dropped_blocks = end

    def register_full_blocks(self, request: Request) -> range:
        """Let the blocks that are complete now be found by their hashes; needs no room. Returns which are new."""
        first = request.num_registered_blocks
        if request.hash_root is None:
            return range(first, first)
        for index in range(first, self._full_blocks(request.num_computed_tokens, request.max_left_blocks)):
            self.pool.register(request.block_table[index], self._hash(request, index))
            request.num_registered_blocks = index + 1
        return range(first, request.num_registered_blocks)

    def offered_hashes(self, request: Request) -> list[str]:
        """Return, in hex, the hashes of leading blocks that others were told of or had before, and it may find."""
        num_blocks = request.num_registered_blocks
        if request.max_found_blocks is not None:
            num_blocks = min(num_blocks, request.max_found_blocks)
        return [self._hash(request, index).hex() for index in range(num_blocks)]

    def describe(self, request: Request, indices: Sequence[int]) -> FilledBlocks:
        """Return hashes, slots and generations of full blocks, one or more in a row."""
        slots = [request.block_table[index] for index in indices]
        return FilledBlocks(
            request.request_id,
            self._hash(request, indices[0] - 1).hex() if indices[0] else "",
            [self._hash(request, index).hex() for index in indices],
            slots,
            [self.pool.generations[slot] for slot in slots],
        )

    def loadable(self, request: Request) -> list[int]:
        """Return which blocks of a request just admitted, right behind those found here, `request.prefix` can fill.

        One token is always left to compute.
        """
        if request.hash_root is None:
            return []
        first, end = request.num_found_blocks, self._full_blocks(request.num_tokens - 1, request.max_found_blocks)
        missing = (index for index in range(first, end) if index not in request.prefix)
        return list(range(first, next(missing, end)))

    def loaded(self, request: Request, num_blocks: int) -> None:
        """Note that the next `num_blocks` blocks have their content now."""
        request.num_computed_tokens += num_blocks * self.pool.block_size
        self.register_full_blocks(request)

    def hold(self, request: Request) -> None:
        """Keep a finished request's blocks, counted apart, until `release_held`."""
        self.pool.hold(request.block_table)

    def release_held(self, request: Request) -> None:
        self.pool.free(request.block_table, held=True)
        self._forget(request)

    def free(self, request: Request) -> None:
        """Give all blocks back; registered ones can be found until they are evicted."""
        self.pool.free(request.block_table[request.num_dropped_blocks :])
        self._forget(request)

    def _find(self, request: Request, max_found_tokens: int) -> tuple[int, list[int]]:
        """Return how many leading blocks need not be had, and the known ones behind them."""
        if request.hash_root is None:
            return 0, []
        hashes = (self._hash(request, i) for i in range(self._full_blocks(max_found_tokens, request.max_found_blocks)))
        if self._window is None or request.mode == "prefill":
            return 0, self.pool.find(hashes)
        return self.pool.find_last(list(hashes), -(-(self._window - 1) // self.pool.block_size))

    def _full_blocks(self, num_tokens: int, limit: int | None) -> int:
        num_blocks = num_tokens // self.pool.block_size
        return num_blocks if limit is None else min(num_blocks, limit)

    def _hash(self, request: Request, index: int) -> BlockHash:
        """Return the hash of a full block, going on with the chain for blocks that came after the prompt."""
        assert request.hash_root is not None, f"{request.request_id} has no hash root"
        hashes, size = request.block_hashes, self.pool.block_size
        while len(hashes) <= index:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else request.hash_root
            hashes.append(next_block_hash(parent, _full(request.token_ids[start : start + size], size)))
        return hashes[index]

    def _forget(self, request: Request) -> None:
        request.block_table = []
        request.num_found_blocks = request.num_registered_blocks = request.num_sealed_blocks = 0
        request.num_dropped_blocks = 0
        request.num_computed_tokens = 0
        request.imported_blocks.clear()


def _full(token_ids: Sequence[int], size: int) -> Sequence[int]:
    assert len(token_ids) == size, f"a block of {len(token_ids)} tokens is not full ({size})"
    return token_ids
