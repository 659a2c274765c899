"""What is known of one stored block?"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Final

from kv_transfer_svc.blocks.allocator import Extent
from kv_transfer_svc.blocks.keys import BlockKey


class BlockState(Enum):
    """The states; `block_store.py` says what leads from one to the next."""

    FILLING = auto()
    SEALED = auto()
    LEASED = auto()
    DEMOTING = auto()


@dataclass(slots=True)
class Block:
    """Owned by the store."""

    key: BlockKey
    extent: Extent
    account_tag: bytes
    since: float
    """When it came, or, of a DEMOTING block, when it began to go."""
    state: BlockState = BlockState.FILLING
    checksum: int = 0
    num_leases: int = 0
    is_pinned: bool = False

    @property
    def is_found(self) -> bool:
        return self.state in (BlockState.SEALED, BlockState.LEASED)

    @property
    def may_go(self) -> bool:
        """Whether it may be evicted."""
        return self.state is BlockState.SEALED and not self.is_pinned


class Known(Enum):
    """The store has the block, or is being given it, or is moving it to disk: nothing to fill."""

    KNOWN = auto()


KNOWN: Final = Known.KNOWN


@dataclass(frozen=True, slots=True)
class Leased:
    """A block that may be read: where it lies, and the xxh3-64 of its bytes."""

    extent: Extent
    checksum: int


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """free + cached + leased + filling = total, in bytes; what is counted is counted since start, in blocks."""

    total_bytes: int
    free_bytes: int
    cached_bytes: int
    leased_bytes: int
    filling_bytes: int
    """Being filled, or being copied to disk before they go."""
    demoting_bytes: int
    """The part of `filling_bytes` that is on its way to disk."""
    pinned_bytes: int
    num_blocks: int
    num_leases: int
    """Readers that hold one."""
    hits: int
    misses: int
    stored: int
    deduplicated: int
    """Begun, and known already."""
    evictions: int
    demotions: int
    """Evictions to disk."""
    refused: int
    """For lack of room, or because a block before them was refused."""
    refused_over_quota: int
    discarded: int
    dropped: int
    leases_expired: int

    def flat(self) -> dict[str, int]:
        """Return name and number of each, as metrics want it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
