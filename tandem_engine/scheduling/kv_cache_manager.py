"""Manages the block tables of requests: which blocks hold the KV of which tokens.

block_table   [ found in the prefix cache | computed or imported here                  | reserved ]
tokens         0 ... num_found_blocks*size  ...                    num_computed_tokens
written        never                        once, then registered when full

Where every layer has a window, blocks behind the window are dropped: they are freed at once, and the prefix cache is
not searched for them. A prefill keeps them, because it hands over the whole prompt.

block_table   [ dropped            |  the window  ...                      num_computed_tokens ]
               num_dropped_blocks

Where only some layers have a window, these layers have block tables of their own (`WindowGroups`).
"""

from __future__ import annotations

from typing import NamedTuple

from tandem_engine.messages import ExtentRef, FilledBlocks
from tandem_engine.scheduling.block_hash import BlockHash
from tandem_engine.scheduling.block_pool import BlockPool
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.sample_points import is_sample_point
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.scheduling.window_groups import WindowGroups, WindowPlan, blocks_of


class _Plan(NamedTuple):
    """The blocks that a request is to get."""

    num_dropped: int
    found: list[int]
    windows: WindowPlan
    num_new: int
    """New blocks of group 0."""
    num_taken: int
    """Spare blocks that it takes in all groups."""


class KVCacheManager:
    """The only writer of block tables. Methods that return False mean "not now" and change nothing."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        self.pool = pool
        self.groups = WindowGroups(pool, config)
        self._window = config.window

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def admit(
        self,
        request: Request,
        num_tokens: int,
        max_found_tokens: int,
        num_reserve_blocks: int = 0,
        num_kept_blocks: int = 0,
    ) -> bool:
        """Give a request without blocks room for `num_tokens`; take leading blocks from the prefix cache.

        Searches the cache for at most `max_found_tokens`, in full blocks; found tokens count as computed. Returns False
        if fewer than `num_reserve_blocks` of each group, and `num_kept_blocks` beside them, would be left for others.
        """
        assert not request.block_table, f"{request.request_id} has blocks already"
        plan = self._plan(request, num_tokens, max_found_tokens)
        if not self._has_spare(plan, num_reserve_blocks, num_kept_blocks):
            return False
        num_dropped, found, windows, num_new_blocks = plan.num_dropped, plan.found, plan.windows, plan.num_new
        num_found = windows.num_found
        self.pool.share(found)
        self.groups.share(windows)
        new = self.pool.allocate(num_new_blocks + self.groups.num_groups * windows.num_new)
        assert new is not None, "the blocks were counted a moment ago"
        request.block_table = [*[0] * num_dropped, *found, *new[:num_new_blocks]]
        self.groups.give(request, windows, new[num_new_blocks:])
        request.num_dropped_blocks = num_dropped + windows.num_dropped
        request.num_found_blocks = request.num_registered_blocks = num_found
        request.num_computed_tokens = num_found * self.pool.block_size
        return True

    def fits(
        self,
        request: Request,
        num_tokens: int,
        max_found_tokens: int,
        num_reserve_blocks: int = 0,
        num_kept_blocks: int = 0,
    ) -> bool:
        """Return what `admit` would return, and change nothing."""
        plan = self._plan(request, num_tokens, max_found_tokens)
        return self._has_spare(plan, num_reserve_blocks, num_kept_blocks)

    def grow_ahead(self, request: Request, num_tokens: int) -> bool:
        """Make room for the token behind those that a step computes now, by blocks whose content nobody can find.

        False if there are too few, or if groups with a window get no block yet: their tables end with the longest run.
        """
        is_done = self.grow(request, num_tokens, only_free=True)
        return is_done and min(map(len, request.tables)) * self.pool.block_size >= num_tokens

    def grow(self, request: Request, num_tokens: int, *, only_free: bool = False) -> bool:
        """Make room for the first `num_tokens` of a request; `only_free`: by no block whose content may be found."""
        num_missing = self.num_blocks_for(num_tokens) - len(request.block_table)
        if num_missing <= 0 and not request.window_tables:
            return True
        num_missing = max(0, num_missing)
        num_all_missing = num_missing + self.groups.num_missing(request, num_tokens)
        if not num_all_missing:
            return True
        is_promised = request.mode == "prefill"
        if not is_promised and num_all_missing > self.num_spare:
            return False
        if only_free and num_all_missing > self.pool.num_free:
            return False
        new = self.pool.allocate(num_all_missing)
        assert new is not None, f"{request.request_id} was promised {num_all_missing} blocks, or they were counted"
        request.block_table.extend(new[:num_missing])
        self.groups.extend(request, new[num_missing:])
        return True

    def room_for_drafts(self, request: Request, num_drafts: int, num_reserve_blocks: int) -> int:
        """Return how many of `num_drafts` have slots behind a request's tokens; add blocks for them if there are any.

        Adds blocks only while `num_reserve_blocks` of each group are left for others.
        """
        num_tokens = request.num_tokens + num_drafts
        if not request.window_tables and num_tokens <= len(request.block_table) * self.pool.block_size:
            return num_drafts
        num_missing = max(0, self.num_blocks_for(num_tokens) - len(request.block_table))
        num_missing += self.groups.num_missing(request, num_tokens)
        if num_missing and num_missing + num_reserve_blocks * (1 + self.groups.num_groups) <= self.num_spare:
            self.grow(request, num_tokens)
        num_blocks = min(len(table) for table in request.tables)
        return min(num_drafts, num_blocks * self.pool.block_size - request.num_tokens)

    def drop_behind_window(self, request: Request) -> None:
        """Free the blocks that no token from `num_computed_tokens` on attends to."""
        if request.window_tables:
            tables, end = request.window_tables, self.groups.first_seen(request.num_computed_tokens)
        elif self._window is not None and request.mode != "prefill":
            tables = [request.block_table]
            end = (request.num_computed_tokens - self._window + 1) // self.pool.block_size
        else:
            return
        first = request.num_dropped_blocks
        if end > first:
            for table in tables:
                self.pool.free(table[first:end])
            request.num_dropped_blocks = end

    def register_full_blocks(self, request: Request) -> range:
        """Make complete blocks findable by their hashes; needs no room. Returns the indices of the new ones."""
        first = request.num_registered_blocks
        if request.hash_root is None:
            return range(first, first)
        for index in range(first, self._full_blocks(request.num_computed_tokens, request.max_left_blocks)):
            block_hash = self._hash(request, index)
            self.pool.register(request.block_table[index], block_hash)
            if is_sample_point((index + 1) * self.pool.block_size):
                self.pool.mark_point(block_hash)
            if index >= max(request.num_dropped_blocks, request.first_whole_block):
                for group, table in enumerate(request.window_tables, 1):
                    self.pool.register(table[index], self.groups.key(block_hash, group))
            request.num_registered_blocks = index + 1
        return range(first, request.num_registered_blocks)

    def describe(self, request: Request, indices: range) -> list[FilledBlocks]:
        """Return hashes, slots and generations of full blocks that were just registered, for each group."""
        filled = []
        for group, table in enumerate(request.tables):
            first_whole = max(request.num_dropped_blocks, request.first_whole_block)
            first = max(indices.start, first_whole) if group else indices.start
            if slots := table[first : indices.stop]:
                filled.append(
                    FilledBlocks(
                        request.request_id,
                        self._hash(request, first - 1).hex() if first else "",
                        [self._hash(request, index).hex() for index in range(first, indices.stop)],
                        slots,
                        [self.pool.generations[slot] for slot in slots],
                        group=group,
                        first_block=first,
                    )
                )
        return filled

    def loadable(self, request: Request) -> range:
        """Return which blocks `request.prefix` can fill, directly behind those found here; for a request just admitted.

        At least one token is left to compute.
        """
        first, end = request.num_found_blocks, self._full_blocks(request.num_tokens - 1, request.max_found_blocks)
        if request.hash_root is None:
            return range(first, first)
        end = next((index for index in range(first, end) if (0, index) not in request.prefix), end)
        while end > first and (gap := self._gap(request, end)) is not None:
            end = gap
        return range(first, end)

    def load_copies(self, request: Request, indices: range) -> list[tuple[int, ExtentRef]]:
        """Return (block, source) pairs that load these blocks: all of group 0, the last ones of the other groups."""
        prefix, first = request.prefix, self.groups.first_loaded(request, indices.stop)
        copies = [(request.block_table[index], prefix[0, index]) for index in indices]
        for group, blank in enumerate(self.groups.blank(request, indices.stop - first), 1):
            copies += [(block, prefix[group, index]) for index, block in enumerate(blank, first)]
        return copies

    def loaded(self, request: Request, indices: range) -> None:
        """Count the tokens of loaded blocks as computed."""
        self.groups.loaded(request, indices.stop)
        request.num_computed_tokens = indices.stop * self.pool.block_size
        self.register_full_blocks(request)

    def mark_ends(self, request: Request) -> None:
        """Let others be told where a prompt and its answer end, in full blocks: a session's next turn goes on there.

        For a request that has done its work, before its blocks are freed or held.
        """
        known, limit = request.num_registered_blocks, request.max_left_blocks
        for end in (request.num_prompt_tokens // self.pool.block_size, known):
            if 0 < end <= known and (limit is None or end <= limit):
                self.pool.mark_point(self._hash(request, end - 1))

    def hold(self, request: Request) -> None:
        """Keep a finished request's blocks until `release_held`; the pool counts them separately."""
        self.groups.settle(request)
        self.pool.hold(blocks_of(request))

    def release_held(self, request: Request) -> None:
        self.pool.free(blocks_of(request), held=True)
        self._forget(request)

    def free(self, request: Request) -> None:
        """Free all blocks; registered blocks can be found until they are evicted."""
        self.pool.free(blocks_of(request))
        self._forget(request)

    @property
    def num_spare(self) -> int:
        """Blocks that can be allocated, without those promised to prefills."""
        return self.pool.num_spare - self.groups.num_promised

    def _plan(self, request: Request, num_tokens: int, max_found_tokens: int) -> _Plan:
        num_dropped, found = self._find(request, max_found_tokens)
        known = num_dropped + len(found)
        windows = self.groups.plan(request, known, lambda index: self._hash(request, index), num_tokens)
        found = found[: windows.num_found - num_dropped]
        num_new = self.num_blocks_for(num_tokens) - windows.num_found
        num_taken = num_new + self.pool.num_unused(found) + self.groups.num_claimed(request, windows)
        return _Plan(num_dropped, found, windows, num_new, num_taken)

    def _has_spare(self, plan: _Plan, num_reserve_blocks: int, num_kept_blocks: int) -> bool:
        num_left = num_reserve_blocks * (1 + self.groups.num_groups) + num_kept_blocks
        return plan.num_taken + num_left <= self.num_spare

    def _find(self, request: Request, max_found_tokens: int) -> tuple[int, list[int]]:
        """Return how many leading blocks are not needed, and the known blocks behind them."""
        if request.hash_root is None:
            return 0, []
        hashes = (self._hash(request, i) for i in range(self._full_blocks(max_found_tokens, request.max_found_blocks)))
        if self._window is None or request.mode == "prefill":
            return 0, self.pool.find(hashes)
        return self.pool.find_last(list(hashes), -(-(self._window - 1) // self.pool.block_size))

    def _gap(self, request: Request, end: int) -> int | None:
        """Return the last block that groups with a window would lack if the prefix ended with block `end`."""
        indices = range(end - 1, self.groups.first_loaded(request, end) - 1, -1)
        groups = range(1, 1 + self.groups.num_groups)
        return next((i for i in indices if any((group, i) not in request.prefix for group in groups)), None)

    def _full_blocks(self, num_tokens: int, limit: int | None) -> int:
        num_blocks = num_tokens // self.pool.block_size
        return num_blocks if limit is None else min(num_blocks, limit)

    def _hash(self, request: Request, index: int) -> BlockHash:
        """Return the key of a full block; extends the chain for blocks of the answer."""
        assert request.chain is not None, f"{request.request_id} has no hash root"
        keys = request.block_hashes
        while len(keys) <= index:
            keys.append(request.chain.next_key(request.token_ids, (len(keys) + 1) * self.pool.block_size))
        return keys[index]

    def _forget(self, request: Request) -> None:
        self.groups.settle(request)
        request.block_table, request.window_tables = [], []
        request.num_found_blocks = request.num_registered_blocks = request.num_sealed_blocks = 0
        request.num_dropped_blocks = request.first_whole_block = 0
        request.num_computed_tokens = request.imported_block_size = 0
        request.imported_blocks.clear()
