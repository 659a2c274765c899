"""The values that describe one stored block: key, state, place and counts.

Those of which a store keeps one for each block are structs that are hashed and compared without Python code, and that
garbage collection does not visit: to visit 100,000 blocks would stop the service for 40 ms. They hold no cycles.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Final

import msgspec

from kv_transfer_svc.blocks.allocator import Extent
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.kv.layout import DIGEST_BYTES

HASH_BYTES = 16


class BlockKey(msgspec.Struct, frozen=True, gc=False):
    """Names a block by its content: the hash of its tokens and all before them, the layout, and the group.

    The content of a key never changes. Raises InvalidRequest for hashes of another length.
    """

    layout_digest: bytes
    group: int
    block_hash: bytes

    def __post_init__(self) -> None:
        if len(self.layout_digest) != DIGEST_BYTES:
            raise InvalidRequest(
                f"a layout digest has {DIGEST_BYTES} bytes, not {len(self.layout_digest)}", field="layout_digest"
            )
        if len(self.block_hash) != HASH_BYTES:
            raise InvalidRequest(f"a block hash has {HASH_BYTES} bytes, not {len(self.block_hash)}", field="block_hash")

    def __str__(self) -> str:
        return f"block {self.block_hash.hex()} of group {self.group}, layout {self.layout_digest.hex()[:8]}"


class BlockState(Enum):
    """The states of a block; `block_store.py` lists the edges between them."""

    FILLING = auto()
    SEALED = auto()
    LEASED = auto()
    DEMOTING = auto()

    __hash__ = object.__hash__  # by identity; Enum's own is Python code


class Block(msgspec.Struct, gc=False):
    """One block in memory. Owned by the store."""

    key: BlockKey
    extent: Extent
    account_tag: bytes
    since: float
    """When the block was begun; for a DEMOTING block, when its demotion began."""
    state: BlockState = BlockState.FILLING
    checksum: int = 0
    num_leases: int = 0
    is_pinned: bool = False

    @property
    def is_readable(self) -> bool:
        return self.state in (BlockState.SEALED, BlockState.LEASED)

    @property
    def is_evictable(self) -> bool:
        return self.state is BlockState.SEALED and not self.is_pinned


class Known(Enum):
    """The store has the block, or it is being filled or demoted: nothing to fill."""

    KNOWN = auto()


KNOWN: Final = Known.KNOWN


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    """A block that may be read: its place, and the xxh3-64 of its bytes."""

    extent: Extent
    checksum: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """free + cached + leased + filling = total, in bytes. Counts are totals since start, in blocks."""

    total_bytes: int
    free_bytes: int
    cached_bytes: int
    leased_bytes: int
    filling_bytes: int
    """Being filled, or being copied to disk before eviction."""
    demoting_bytes: int
    """The part of `filling_bytes` that is being copied to disk."""
    pinned_bytes: int
    num_blocks: int
    num_leases: int
    """Readers that hold a lease."""
    hits: int
    misses: int
    stored: int
    deduplicated: int
    """Blocks offered that the store already knew."""
    evictions: int
    demotions: int
    """Evictions to disk."""
    refused: int
    """For lack of memory, or because an earlier block of the chain was refused."""
    refused_over_quota: int
    discarded: int
    dropped: int
    leases_expired: int

    def flat(self) -> dict[str, int]:
        """Return each name with its number, for metrics."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
