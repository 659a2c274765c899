"""Loads prefixes from a cache outside the engine, and reports filled blocks to that cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem_engine.messages import ExtentRef, FilledBlocks
from tandem_engine.scheduling.kv_cache_manager import KVCacheManager
from tandem_engine.scheduling.ledger import Ledger
from tandem_engine.scheduling.request import Request

Load = Callable[[Sequence[int], Sequence[ExtentRef]], int]
"""Copies extents into the blocks beside them; returns how many blocks have their content now: all or none."""


class PrefixExchange:
    """Loads the prefixes of requests as they are admitted, and collects what the next StepDone reports of them."""

    def __init__(self, kv: KVCacheManager, ledger: Ledger, load: Load) -> None:
        self._kv = kv
        self._ledger = ledger
        self._load = load
        self._filled: list[FilledBlocks] = []
        self._admitted: list[str] = []

    def admit(self, request: Request) -> None:
        """Copy the prefix of a request that has just got its blocks; the engine computes what cannot be copied.

        The prefix is lent for one admission: a request that is preempted later computes its tokens again.
        """
        self._admitted.append(request.request_id)
        indices = self._kv.loadable(request)
        copies = self._kv.load_copies(request, indices)
        request.prefix = {}
        if copies and self._load([block for block, _ in copies], [extent for _, extent in copies]):
            self._kv.loaded(request, indices)
            self._ledger.loaded(request, request.num_computed_tokens)

    def register(self, request: Request) -> None:
        """Make blocks that were computed here findable by their hashes, here and elsewhere."""
        if indices := self._kv.register_full_blocks(request):
            self._filled += self._kv.describe(request, indices)

    def take(self) -> tuple[list[FilledBlocks], list[str]]:
        """Return, once, the blocks filled since the last call and the requests that were admitted."""
        taken, self._filled, self._admitted = (self._filled, self._admitted), [], []
        return taken
