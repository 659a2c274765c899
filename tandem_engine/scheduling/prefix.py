"""What does this pool take from a cache outside the engine, and what can others take from here?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem_engine.messages import ExtentRef, FilledBlocks, PrefixBlock
from tandem_engine.scheduling.kv_cache_manager import KVCacheManager
from tandem_engine.scheduling.ledger import Ledger
from tandem_engine.scheduling.recovery import Recovery
from tandem_engine.scheduling.request import Request, RequestState

Load = Callable[[Sequence[int], Sequence[ExtentRef]], int]
"""Copies extents into the blocks beside them and returns how many blocks have their content now: all, or none."""


class PrefixExchange:
    """Loads the prefixes of requests as they are admitted, and keeps what is to be told of them."""

    def __init__(
        self, kv: KVCacheManager, ledger: Ledger, load: Load, recovery: Recovery, timer: Callable[[], float]
    ) -> None:
        self._kv = kv
        self._ledger = ledger
        self._load = load
        self._recovery = recovery
        self._timer = timer
        self._filled: list[FilledBlocks] = []
        self._admitted: list[str] = []
        self._preempted: dict[str, list[str]] = {}

    def admit(self, request: Request) -> float:
        """Copy what lies ready of a request that has just been given its blocks; what cannot be had is computed.

        What lies ready is lent for this once. A request that was preempted loads only what is not computed faster.
        Returns the seconds it took.
        """
        self._admitted.append(request.request_id)
        indices = self._kv.loadable(request)
        copies = self._kv.load_copies(request, indices)
        request.prefix = {}
        was_here = request.num_preemptions > 0
        if not copies or (was_here and not self._recovery.is_loading_faster(indices.start, len(indices), len(copies))):
            return 0.0
        started = self._timer()
        num_blocks = self._load([block for block, _ in copies], [extent for _, extent in copies])
        seconds = self._timer() - started
        self._recovery.copies.observe(num_blocks, seconds)
        if num_blocks:
            self._kv.loaded(request, indices)
        if was_here:
            self._ledger.count("blocks_recovered", num_blocks)
        if request.mode != "decode":  # its prompt is accounted for where it was computed
            self._ledger.loaded(request, request.num_computed_tokens)
        return seconds

    def preempt(self, request: Request) -> None:
        """A request is about to lose its blocks: ask for them, if loading them should be faster than computing them."""
        hashes = self._kv.offered_hashes(request)
        num_copies = self._kv.groups.num_copies(len(hashes))
        if hashes and self._recovery.is_loading_faster(0, len(hashes), num_copies):
            self._preempted[request.request_id] = hashes

    def offer(self, request: Request | None, request_id: str, prefix: Sequence[PrefixBlock]) -> bool:
        """Take the answer to `preempt`; too late, it is given back at once. Returns whether it is of use."""
        if request is None or request.state is not RequestState.PREEMPTED:
            self._admitted.append(request_id)
            return False
        request.prefix = {(block.group, block.index): block.extent for block in prefix}
        return True

    def register(self, request: Request) -> None:
        """Let blocks that were computed here be found by their hashes, here and elsewhere."""
        if indices := self._kv.register_full_blocks(request):
            self._filled += self._kv.describe(request, indices)

    def take(self) -> tuple[list[FilledBlocks], list[str]]:
        """Return, once, the blocks filled since the last call and the requests that were admitted."""
        taken, self._filled, self._admitted = (self._filled, self._admitted), [], []
        return taken

    def take_preempted(self) -> dict[str, list[str]]:
        """Return, once, the preempted requests whose blocks are wanted back, with their hashes."""
        taken, self._preempted = self._preempted, {}
        return taken
