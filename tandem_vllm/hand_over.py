"""Hands blocks of vLLM's pool over: reserves and fills those of decode requests, announces those of prefills.

    decode    blocks taken when added ─▶ slabs imported ─▶ registered, brought to vLLM (`Arrivals`) with token one
    prefill   blocks held as they fill ─▶ copied to slots, announced ─▶ let go of with ReleaseHeld
    all       full blocks computed here are copied to slots for caches; blocks that caches have are loaded

A request's `block_table` has the blocks that Tandem holds for it, not those of vLLM's request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from tandem_engine.errors import CorruptBlock, RegionError
from tandem_engine.messages import ExtentRef, FilledBlocks, MapRegion, SealedBlocks
from tandem_engine.publisher import Publisher
from tandem_engine.scheduling.admission import RequestRefused, max_kv_tokens
from tandem_engine.scheduling.copy_budget import CopyBudget, pieces
from tandem_engine.scheduling.hand_over import num_ready_tokens
from tandem_engine.scheduling.ledger import Ledger
from tandem_engine.scheduling.refused_hand_overs import RefusedHandOvers
from tandem_engine.scheduling.request import Request, RequestState
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.scheduling.slab_importer import SlabImporter
from tandem_vllm.arrivals import Arrivals
from tandem_vllm.blocks import Blocks, Memory
from tandem_vllm.keys import num_shared_blocks, pool_key, shared_key

log = logging.getLogger(__name__)

_NO_WINDOW = 0


class _Loading(NamedTuple):
    """A prefix on its way into the pool."""

    request: Request
    indices: range
    blocks: Sequence[int]
    extents: Sequence[ExtentRef]
    pieces: Iterator[slice]


class Exchange(NamedTuple):
    """vLLM's pool, as far as Tandem exchanges blocks with it."""

    blocks: Blocks
    memory: Memory
    publisher: Publisher
    arrivals: Arrivals


class HandOver:
    """The only writer of `block_table`, and of what Tandem holds in vLLM's pool."""

    def __init__(
        self,
        config: SchedulerConfig,
        exchange: Exchange,
        requests: Mapping[str, Request],
        ledger: Ledger,
        budget: CopyBudget,
        clock: Callable[[], int],
    ) -> None:
        """`requests` are those that the core has now, by id; `clock` returns nanoseconds, and nobody sets it."""
        self._blocks, self._memory, self.publisher, self._arrivals = exchange
        self.importer = SlabImporter(requests, self._memory, ledger, budget, config.block_size)
        self._config = config
        self._size = config.block_size
        self._ledger = ledger
        self._budget = budget
        self._clock = clock
        self._refused = RefusedHandOvers(config)
        self._loading: _Loading | None = None
        self._may_load = True
        self._held: Counter[int] = Counter()
        self._admitted: list[str] = []
        self._sealed: list[SealedBlocks] = []
        self._filled: list[FilledBlocks] = []

    # --------------------------------------------------------------------------------------------------- decode

    def reserve(self, request: Request, num_live: int, num_preempted: int, head: Request | None) -> None:
        """Take the blocks of a decode request's prompt and first token; raises RequestRefused.

        One block per live request is left, so that running requests can grow. While preempted requests wait for
        blocks, no new request overtakes them unless its turn has come. `head` is the first of the queue: its blocks
        are left to it unless its class is lower.
        """
        now_ns = self._clock()
        self._refused.offered(request, now_ns)
        is_due = self._refused.is_due(request, now_ns)
        num_tokens = min(request.num_tokens + 1, max_kv_tokens(request, self._config))
        limit = min(request.num_tokens // self._size, num_shared_blocks(request))
        found = self._blocks.find(pool_key(request, index, self._size) for index in range(int(limit)))
        num_new = self._num_blocks(num_tokens) - len(found)
        num_taken = num_new + sum(not self._blocks.num_references(block) for block in found)
        num_kept = self._num_kept_from(request, num_live, head, now_ns)
        if (num_preempted and not is_due) or num_taken + num_live + num_kept > self._blocks.num_available:
            self._refused.refused(request, self._num_blocks(num_tokens), now_ns)
            raise RequestRefused(
                "kv_full",
                f"{num_taken} KV blocks are needed and one for each of {num_live} live requests, "
                f"{self._blocks.num_available} of {self._config.num_blocks} are available, {num_kept} of them are kept "
                f"for requests whose turn is earlier, {num_preempted} preempted requests wait; try again later or "
                "another worker",
            )
        self._refused.accepted(request)
        self._blocks.hold(found)
        request.block_table = [*found, *self._blocks.take(num_new)]
        request.num_found_blocks = request.num_registered_blocks = len(found)
        request.num_computed_tokens = len(found) * self._size
        request.state = RequestState.IMPORTING
        self._ledger.found(request, request.num_computed_tokens)

    @property
    def is_refused_due(self) -> bool:
        """Whether a refused hand-over has its turn: what it lacks is kept for it."""
        return self._refused.due(self._clock()) is not None

    def num_kept_blocks(self, num_live: int) -> int:
        """Count the blocks that the queue leaves to a refused hand-over that has its turn."""
        due = self._refused.due(self._clock())
        return self._refused.num_missing_blocks(due) + num_live + 1 if due is not None else 0

    def bring(self, request: Request) -> None:
        """Give the blocks of a decode request to vLLM's request of the same id, which follows."""
        num_ready = num_ready_tokens(request, self._size, _NO_WINDOW)
        full = request.block_table[: num_ready // self._size]
        self._blocks.register(full, [pool_key(request, index, self._size) for index in range(len(full))])
        self._arrivals.bring_table(request.request_id, request.block_table, num_ready)
        request.block_table = []
        request.num_registered_blocks = len(full)
        request.num_computed_tokens = num_ready

    # -------------------------------------------------------------------------------------- prefill and aggregated

    def bring_prefix(self, request: Request) -> None:
        """Load the blocks of `request.prefix` once vLLM's scheduler reaches the request."""
        if request.prefix:
            self._arrivals.bring_prefix(request.request_id, partial(self._load, request))

    def begin_step(self) -> None:
        """Called before vLLM's scheduler may reach requests with a prefix."""
        self._may_load = True

    def end_step(self, *, is_empty: bool) -> None:
        """Give up a load that vLLM's scheduler did not reach in an empty step: others may wait for its blocks."""
        if is_empty and self._may_load and self._loading is not None:
            self._cancel_load(self._loading.request)

    @property
    def is_loading(self) -> bool:
        """Whether a load goes on with the next step."""
        return self._loading is not None

    def num_missing_blocks(self, request: Request) -> int:
        """Count the blocks that a request of the queue, or a prefill, may still take from the pool."""
        return self._num_blocks(request.num_tokens) - len(request.block_table)

    def computed(self, request: Request, first: int, end: int, table: Sequence[int]) -> None:
        """Note that the KV of tokens [first, end) was computed, into the blocks of `table`."""
        if request.mode == "prefill":
            self._seal(request, end, table)
        self._fill(request, first, end, table)

    def hold(self, request: Request) -> None:
        """Count a finished prefill's blocks as held until `forget`."""
        request.state = RequestState.HELD
        self._held.update(request.block_table)

    # ----------------------------------------------------------------------------------------------------- all

    def map_region(self, command: MapRegion, fds: Sequence[int]) -> None:
        """Map a region; a region that cannot be mapped fails only the imports that need it."""
        try:
            self._memory.map_region(command, *fds)
        except (RegionError, OSError) as error:
            log.warning("region %s cannot be mapped: %s", command.region_id, error)

    def unmap_region(self, region_id: str) -> None:
        self._memory.unmap_region(region_id)

    def forget(self, request: Request) -> None:
        """Let go of all that is held for a request, in whatever state."""
        if request.state is RequestState.HELD:
            self._held.subtract(request.block_table)
            self._held = +self._held
        self._cancel_load(request)
        self._arrivals.forget(request.request_id)
        self._blocks.let_go(request.block_table)
        request.block_table = []
        request.imported_blocks.clear()

    @property
    def num_held_blocks(self) -> int:
        """Used blocks that only finished prefills keep."""
        return sum(self._blocks.num_references(block) == count for block, count in self._held.items())

    @property
    def num_available_blocks(self) -> int:
        return self._blocks.num_available

    def publish(self) -> None:
        """Start to copy what was sealed and filled to slots, as far as there are slots."""
        sealed, filled = self._sealed, self._filled
        self._sealed, self._filled = [], []
        self.publisher.publish(sealed, filled)

    def take_admitted(self) -> list[str]:
        """Return, once, the requests whose prefix is not needed any more."""
        admitted, self._admitted = self._admitted, []
        return admitted

    # ------------------------------------------------------------------------------------------------- helpers

    def _num_kept_from(self, request: Request, num_live: int, head: Request | None, now_ns: int) -> int:
        """Count the blocks that a hand-over leaves to those whose turn is before its own."""
        due = self._refused.due(now_ns)
        if due is not None and self._refused.is_due(request, now_ns):  # one choice leaves the blocks of the others
            return self._refused.num_missing_blocks(due) - due.num_blocks_each
        num_kept = self._refused.num_missing_blocks(due) if due is not None else 0
        if head is not None and head.effective_priority >= request.priority:
            num_kept += self.num_missing_blocks(head)
        return num_kept + num_live + 1 if num_kept else 0

    def _load(self, request: Request, num_found_tokens: int) -> bool | None:
        """Go on with the load of a request's prefix; loads of other requests wait, and may find the blocks then.

        Copies one piece in each step even if imports have spent the budget: they could do so in every step.
        """
        if self._loading is not None and self._loading.request is not request:
            return None
        if self._loading is None:
            self._loading = self._begin_load(request, num_found_tokens)
        loading = self._loading
        if loading is None:
            return False
        try:
            while self._may_load or self._budget.has_left:
                self._may_load = False
                if (piece := next(loading.pieces, None)) is None:
                    self._loaded(loading, num_found_tokens)
                    return True
                copy = partial(self._memory.import_blocks, loading.blocks[piece], loading.extents[piece])
                self._budget.timed(copy)
        except RegionError as error:
            if isinstance(error, CorruptBlock):
                log.error("a cached prefix is corrupt: %s", error)
                self._ledger.count("blocks_corrupt")
            log.info("a cached prefix is gone: %s", error)
            self._cancel_load(request)
            return False
        return None

    def _begin_load(self, request: Request, num_found_tokens: int) -> _Loading | None:
        """Take blocks for all that follows without a gap what vLLM has; None: there is nothing, or no room."""
        prefix, request.prefix = request.prefix, {}
        limit = min((request.num_tokens - 1) // self._size, num_shared_blocks(request))
        first = num_found_tokens // self._size
        indices = range(first, next((i for i in range(first, int(limit)) if (0, i) not in prefix), int(limit)))
        if not indices or len(indices) > self._blocks.num_available:
            self._admitted.append(request.request_id)
            return None
        blocks, extents = self._blocks.take(len(indices)), [prefix[0, index] for index in indices]
        return _Loading(request, indices, blocks, extents, pieces(extents))

    def _loaded(self, loading: _Loading, num_found_tokens: int) -> None:
        """Leave the blocks in vLLM's prefix cache: the request finds them in the next step, and nobody holds them."""
        request, indices, blocks = loading.request, loading.indices, loading.blocks
        self._loading = None
        self._admitted.append(request.request_id)
        self._blocks.register(blocks, [pool_key(request, index, self._size) for index in indices])
        self._ledger.found(request, min(num_found_tokens, indices.start * self._size))
        self._ledger.loaded(request, indices.stop * self._size)
        self._blocks.let_go(blocks)

    def _cancel_load(self, request: Request) -> None:
        """Let go of the blocks of a load that is not complete, if the request has one."""
        if (loading := self._loading) is not None and loading.request is request:
            self._loading = None
            self._admitted.append(request.request_id)
            self._blocks.let_go(loading.blocks)

    def _seal(self, request: Request, end: int, table: Sequence[int]) -> None:
        """Hold and announce a prefill's blocks that became complete; at its end also the last one."""
        is_last = end == request.num_tokens
        first, stop = request.num_sealed_blocks, self._num_blocks(end) if is_last else end // self._size
        if stop <= first or request.is_release_due:
            return
        request.num_sealed_blocks = stop
        blocks = list(table[first:stop])
        self._blocks.hold(blocks)
        request.block_table += blocks
        self._sealed.append(SealedBlocks(request.request_id, first, blocks, self._stamps(blocks), is_last))

    def _fill(self, request: Request, first: int, end: int, table: Sequence[int]) -> None:
        """Describe full blocks that others may find by their keys."""
        if request.hash_root is None:
            return
        stop = end // self._size
        if request.max_left_blocks is not None:
            stop = min(stop, request.max_left_blocks)
        start = max(first // self._size, request.num_registered_blocks)
        if start >= stop:
            return
        request.num_registered_blocks = stop
        parent = shared_key(request, start - 1, self._size).hex() if start else ""
        keys = [shared_key(request, index, self._size).hex() for index in range(start, stop)]
        blocks = list(table[start:stop])
        self._filled.append(
            FilledBlocks(request.request_id, parent, keys, blocks, self._stamps(blocks), first_block=start)
        )

    def _stamps(self, blocks: Sequence[int]) -> list[int]:
        return [self._blocks.generations[block] for block in blocks]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)
