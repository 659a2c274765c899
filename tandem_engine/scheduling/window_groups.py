"""Manages the blocks of layers with a window in a model that also has layers without one.

Group 0 has the layers that attend to all tokens: `Request.block_table` has its blocks, and it keeps all of them. Each
further group has a table of its own with the same indices. The group keeps only the blocks within the window and those
that the next run can write. All groups allocate from one pool.

block_table         [ b0   b1   b2   b3   b4   b5   b6   b7   b8 ...  all tokens that are known             ]
window_tables[0]    [  -    -    -    -   w0   w1   w2   w3 ]         up to the end of the longest next run
window_tables[1]    [  -    -    -    -   w4   w5   w6   w7 ]
                                          num_dropped_blocks = 4

A prefill hands over the blocks that the answer attends to, and frees the others as it proceeds. A prefill is never
preempted, so it must never lack a block: the blocks that it may still need are promised to it from the start. The
promise holds because each block that it frees makes room for one that it allocates: a shared block counts for every
request that has it (`BlockPool.share`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from tandem_engine.scheduling.block_hash import BlockHash
from tandem_engine.scheduling.block_pool import BlockPool
from tandem_engine.scheduling.request import Request, RequestState
from tandem_engine.scheduling.scheduler_config import SchedulerConfig


@dataclass(frozen=True)
class WindowPlan:
    """The blocks that a request is to get."""

    num_found: int
    """Leading blocks that are cached: all groups have what the tokens behind them attend to."""
    num_dropped: int = 0
    """Leading blocks that no group with a window needs."""
    found: list[list[int]] = field(default_factory=list)
    """For each group: cached blocks behind the dropped ones."""
    num_new: int = 0
    """New blocks that each group gets behind the cached ones."""


class WindowGroups:
    """The groups with a window; if there are none, no method has an effect."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        self.num_groups = config.num_window_groups or 0
        self.window = config.group_window or 1
        self._pool = pool
        self._max_run_tokens = config.max_num_batched_tokens
        self._num_window_blocks = self._blocks(self.window - 1)
        self._most_for_a_run = self._num_window_blocks + self._blocks(self._max_run_tokens) + 2
        self._promised_to: dict[Request, None] = {}

    def __bool__(self) -> bool:
        return self.num_groups > 0

    def plan(
        self, request: Request, num_known: int, hash_of: Callable[[int], BlockHash], num_tokens: int
    ) -> WindowPlan:
        """Plan the blocks of a request of `num_tokens`; group 0 has its `num_known` leading blocks."""
        if not self.num_groups:
            return WindowPlan(num_known)
        num_found, found = self._find(num_known, hash_of)
        num_dropped = num_found - len(found[0])
        if _is_imported(request):  # no slab brings the blocks between
            first_seen = self.first_seen(request.num_tokens)
            if num_found < first_seen:
                return WindowPlan(num_found, first_seen, [[] for _ in found], self._blocks(num_tokens) - first_seen)
        num_new = self._end(request, num_found, len(found[0]), num_tokens) - num_found
        return WindowPlan(num_found, num_dropped, found, num_new)

    @property
    def num_promised(self) -> int:
        """Blocks that prefills may still need beside those that they have."""
        return sum(
            self._promise(request, request.num_dropped_blocks, len(request.window_tables[0]))
            for request in self._promised_to
        )

    def num_claimed(self, request: Request, plan: WindowPlan) -> int:
        """Count the spare blocks of a plan, and those that the request may still need before it answers.

        Only prefills get a promise for the latter. Other requests are counted too, so that none is admitted that would
        be preempted in the middle of its prompt.
        """
        num_mine = len(plan.found[0]) + plan.num_new if plan.found else 0
        end = plan.num_dropped + num_mine
        return self.num_groups * num_mine + (self._promise(request, plan.num_dropped, end) if self.num_groups else 0)

    def share(self, plan: WindowPlan) -> None:
        """Share the cached blocks; before the next allocation."""
        self._pool.share(chain.from_iterable(plan.found), is_claim=True)

    def give(self, request: Request, plan: WindowPlan, new: Sequence[int]) -> None:
        """Build the tables: the plan's cached blocks, then `num_new` of the `new` blocks for each group."""
        if not self.num_groups:
            return
        if request.mode == "prefill":
            self._promised_to[request] = None
        missing = [0] * plan.num_dropped
        parts = (new[group * plan.num_new : (group + 1) * plan.num_new] for group in range(self.num_groups))
        request.window_tables = [[*missing, *found, *part] for found, part in zip(plan.found, parts, strict=True)]

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Count the blocks that all groups lack for the next run of a request of `num_tokens`."""
        end = self._blocks(min(num_tokens, request.num_computed_tokens + self._max_run_tokens))
        return sum(max(0, end - len(table)) for table in request.window_tables)

    def extend(self, request: Request, new: Sequence[int]) -> None:
        """Add blocks to the tables, the same number to each."""
        count = len(new) // max(1, self.num_groups)
        for group, table in enumerate(request.window_tables):
            table.extend(new[group * count : (group + 1) * count])

    def settle(self, request: Request) -> None:
        """End the promise to a request that is computed or over."""
        self._promised_to.pop(request, None)

    def can_compute(self, request: Request) -> bool:
        """Whether the groups have all blocks that the next token attends to."""
        first_seen = self.first_seen(request.num_computed_tokens)
        return not request.window_tables or request.num_dropped_blocks <= first_seen

    def first_seen(self, position: int) -> int:
        """Return the first block that the token at `position` attends to in these groups."""
        return max(0, position - self.window + 1) // self._pool.block_size

    def first_loaded(self, request: Request, end: int) -> int:
        """Return the first block that is needed to compute tokens behind block `end`."""
        return max(request.num_found_blocks, end - self._num_window_blocks)

    def blank(self, request: Request, count: int) -> list[list[int]]:
        """Return the first blocks of each group that have no content yet."""
        first = request.num_found_blocks
        return [table[first : first + count] for table in request.window_tables]

    def loaded(self, request: Request, end: int) -> None:
        """Move the `blank` blocks, which now have the content before block `end`, to their indices."""
        found, first = request.num_found_blocks, self.first_loaded(request, end)
        if first == found or not self.num_groups:
            return
        num_kept = self._end(request, end, end - first, request.num_tokens) - first
        for group, table in enumerate(request.window_tables):
            mine = table[found:]
            self._pool.free([*table[request.num_dropped_blocks : found], *mine[num_kept:]])
            request.window_tables[group] = [*[0] * first, *mine[:num_kept]]
        request.num_dropped_blocks = first

    def key(self, block_hash: BlockHash, group: int) -> BlockHash:
        """Return the pool's key of a block of `group`; for group 0 the block hash itself."""
        return BlockHash(block_hash + bytes([group])) if group else block_hash

    def _find(self, num_known: int, hash_of: Callable[[int], BlockHash]) -> tuple[int, list[list[int]]]:
        """Return the length of the longest prefix whose last blocks within the window are cached, and those blocks."""
        found: list[list[int]] = []  # a row per block, the last one first
        end = num_known
        for index in range(num_known - 1, -1, -1):
            if len(found) == self._num_window_blocks:
                break
            block_hash = hash_of(index)
            row = self._pool.find(self.key(block_hash, group) for group in range(1, self.num_groups + 1))
            if len(row) < self.num_groups:
                found, end = [], index
            else:
                found.append(row)
        groups = [list(table) for table in zip(*found[::-1], strict=True)]
        return end, groups or [[] for _ in range(self.num_groups)]

    def _end(self, request: Request, num_found: int, num_behind: int, num_tokens: int) -> int:
        """Return the end of the tables: the first run and the window behind it, or all tokens if those are fewer.

        A prefix that will be loaded has its window behind the cached blocks, at an index that is not known yet.
        """
        if _is_imported(request):
            return self._blocks(num_tokens)
        size = self._pool.block_size
        ahead = self._num_window_blocks * size if request.prefix else max(0, self.window - 1 - num_behind * size)
        return self._blocks(min(num_tokens, num_found * size + ahead + self._max_run_tokens))

    def _promise(self, request: Request, num_dropped: int, end: int) -> int:
        """Count the blocks that a prefill with tables up to block `end` may still need: for a run, or to its end."""
        num_lacking = min(self._most_for_a_run - (end - num_dropped), self._blocks(request.num_tokens) - end)
        return self.num_groups * max(0, num_lacking)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)


def most_blocks(config: SchedulerConfig, num_tokens: int) -> int:
    """Return the most blocks of all groups that a request of `num_tokens` has at a time."""
    end = -(-num_tokens // config.block_size)
    if config.num_window_groups is None or config.group_window is None:
        return end
    window, run = (
        -(-(config.group_window - 1) // config.block_size),
        -(-config.max_num_batched_tokens // config.block_size),
    )
    return end + config.num_window_groups * min(end, 2 * window + run + 2)


def blocks_of(request: Request) -> list[int]:
    """Return a request's blocks of all groups, ordered so that the end of the prompt is the end of the list."""
    if not request.window_tables:
        return request.block_table[request.num_dropped_blocks :]
    first = request.num_dropped_blocks
    rows = zip_longest(request.block_table[first:], *(table[first:] for table in request.window_tables))
    return [*request.block_table[:first], *(block for block in chain.from_iterable(rows) if block is not None)]


def _is_imported(request: Request) -> bool:
    """Whether a request's blocks will be imported from a prefill."""
    return request.mode == "decode" and request.state is RequestState.WAITING
