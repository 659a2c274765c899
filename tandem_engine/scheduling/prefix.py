"""Loads prefixes from a cache outside the engine, and reports filled blocks to that cache.

A load takes as many steps as the copy budget wants; its request has its blocks and a seat, and runs in none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tandem_engine.messages import ExtentRef, FilledBlocks
from tandem_engine.scheduling.copy_budget import CopyBudget, pieces
from tandem_engine.scheduling.kv_cache_manager import KVCacheManager
from tandem_engine.scheduling.ledger import Ledger
from tandem_engine.scheduling.request import Request

Load = Callable[[Sequence[int], Sequence[ExtentRef]], int]
"""Copies extents into the blocks beside them; returns how many blocks have their content now: all or none."""


@dataclass
class _Loading:
    request: Request
    indices: range
    blocks: Sequence[int]
    extents: Sequence[ExtentRef]
    pieces: Iterator[slice]


class PrefixExchange:
    """Loads the prefixes of requests as they are admitted, and collects what the next StepDone reports of them."""

    def __init__(self, kv: KVCacheManager, ledger: Ledger, load: Load, budget: CopyBudget) -> None:
        self._kv = kv
        self._ledger = ledger
        self._load = load
        self._budget = budget
        self._loading: _Loading | None = None
        self._filled: list[FilledBlocks] = []
        self._admitted: list[str] = []

    def admit(self, request: Request) -> None:
        """Begin to copy the prefix of a request that has just got its blocks, while none `is_loading`.

        The engine computes what cannot be copied. The prefix is lent for one admission: a request that is preempted
        later computes its tokens again.
        """
        indices = self._kv.loadable(request)
        copies = self._kv.load_copies(request, indices)
        request.prefix = {}
        if not copies:
            self._admitted.append(request.request_id)
            return
        blocks, extents = [block for block, _ in copies], [extent for _, extent in copies]
        self._loading = _Loading(request, indices, blocks, extents, pieces(extents))
        self.go_on()

    @property
    def is_loading(self) -> bool:
        return self._loading is not None

    def num_loading_tokens(self, request: Request) -> int:
        """Count the tokens that a request will not compute if its load succeeds; 0: it loads nothing now."""
        if (loading := self._loading) is None or loading.request is not request:
            return 0
        return loading.indices.stop * self._kv.pool.block_size - request.num_computed_tokens

    def go_on(self) -> None:
        """Continue the load within the copy budget; a request gets all of its prefix or nothing.

        Copies a piece even if imports have spent the budget: they could do so in every step.
        """
        is_first = True
        while (loading := self._loading) is not None and (is_first or self._budget.has_left):
            is_first = False
            piece = next(loading.pieces, None)
            if piece is None:
                self._kv.loaded(loading.request, loading.indices)
                self._ledger.loaded(loading.request, loading.request.num_computed_tokens)
                self.cancel(loading.request)
            elif not self._load(loading.blocks[piece], loading.extents[piece]):
                self.cancel(loading.request)

    def cancel(self, request: Request) -> None:
        """End the load of a request, if it has one: its prefix is not read any more."""
        if self._loading is not None and self._loading.request is request:
            self._loading = None
            self._admitted.append(request.request_id)

    def register(self, request: Request) -> None:
        """Make blocks that were computed here findable by their hashes, here and elsewhere."""
        if indices := self._kv.register_full_blocks(request):
            self._filled += self._kv.describe(request, indices)

    def take(self) -> tuple[list[FilledBlocks], list[str]]:
        """Return, once, the blocks filled since the last call and the requests that were admitted."""
        taken, self._filled, self._admitted = (self._filled, self._admitted), [], []
        return taken
