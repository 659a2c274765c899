"""What does this pool take from a cache outside the engine, and what can others take from here?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.messages import ExtentRef, FilledBlocks
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.ledger import Ledger
from engine.scheduling.request import Request

Load = Callable[[Sequence[int], Sequence[ExtentRef]], int]
"""Copies extents into the blocks beside them and returns how many blocks have their content now: all, or none."""


class PrefixExchange:
    """Loads the prefixes of requests as they are admitted, and keeps what is to be told of them."""

    def __init__(self, kv: KVCacheManager, ledger: Ledger, load: Load) -> None:
        self._kv = kv
        self._ledger = ledger
        self._load = load
        self._filled: list[FilledBlocks] = []
        self._admitted: list[str] = []

    def admit(self, request: Request) -> None:
        """Copy what lies ready of a request that has just been given its blocks; what cannot be had is computed."""
        self._admitted.append(request.request_id)
        indices = self._kv.loadable(request)
        if not indices:
            return
        blocks = [request.block_table[index] for index in indices]
        num_blocks = self._load(blocks, [request.prefix[index] for index in indices])
        self._kv.loaded(request, num_blocks)
        self._ledger.loaded(request, request.num_computed_tokens)

    def register(self, request: Request) -> None:
        """Let blocks that were computed here be found by their hashes, here and elsewhere."""
        if indices := self._kv.register_full_blocks(request):
            self._filled.append(self._kv.describe(request, indices))

    def take(self) -> tuple[list[FilledBlocks], list[str]]:
        """Return, once, the blocks filled since the last call and the requests that were admitted."""
        taken, self._filled, self._admitted = (self._filled, self._admitted), [], []
        return taken
