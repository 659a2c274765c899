"""Which block goes first when room is needed?

A policy orders keys and holds no blocks: the store tells it what came, was used and went, and asks it for a victim.
Blocks of one prompt form a chain, and one without its predecessors is useless: a policy names a block only when none
that follows it is left (a leaf), so that a busy leaf keeps its whole chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kv_transfer_svc.blocks.keys import BlockKey

IsBusy = Callable[[BlockKey], bool]


class EvictionPolicy(Protocol):
    """Every method takes O(log n) at most, averaged over calls."""

    def added(self, key: BlockKey, num_bytes: int, cost: float, parent: BlockKey | None) -> None:
        """A block has come, after `parent` in its prompt; `cost` is that of computing it anew, in any one unit."""

    def used(self, keys: Sequence[BlockKey]) -> None:
        """These blocks were used together, once; unknown keys are passed over."""

    def removed(self, key: BlockKey) -> None:
        """A block is gone, for whatever reason; an unknown key is no harm."""

    def victim(self, is_busy: IsBusy) -> BlockKey | None:
        """Return the block to go next, without removing it; None if every leaf is busy.

        Busy leaves that are met on the way count as needed now, so that the next call need not pass them again.
        """
