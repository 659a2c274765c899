"""Tracks which reader holds which blocks, and until when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kv_transfer_svc.blocks.block import BlockKey


@dataclass(slots=True)
class BlockLease:
    """The blocks of one reader, whose leases end together. Times are the caller's clock, in seconds."""

    until: float
    keys: dict[BlockKey, None] = field(default_factory=dict)


class BlockLeases:
    """Leases by reader."""

    def __init__(self) -> None:
        self._leases: dict[str, BlockLease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[BlockLease]:
        return iter(self._leases.values())

    def by_reader(self) -> list[tuple[str, BlockLease]]:
        return list(self._leases.items())

    def open(self, reader_id: str, keys: Sequence[BlockKey], until: float) -> list[BlockKey]:
        """Add keys to a reader's lease and extend, never shorten, the lease; return the keys new to the reader."""
        if not keys:
            return []
        lease = self._leases.setdefault(reader_id, BlockLease(until))
        lease.until = max(lease.until, until)
        new_keys = [key for key in dict.fromkeys(keys) if key not in lease.keys]
        lease.keys.update(dict.fromkeys(new_keys))
        return new_keys

    def end(self, reader_id: str) -> list[BlockKey]:
        """End a reader's lease and return its keys; an empty list without a lease."""
        lease = self._leases.pop(reader_id, None)
        return list(lease.keys) if lease is not None else []

    def lapsed(self, now: float) -> list[str]:
        """Return the readers whose lease has ended at `now`."""
        return [reader_id for reader_id, lease in self._leases.items() if lease.until <= now]

    def over(self, now: float) -> list[BlockLease]:
        """Return the leases that have ended at `now`."""
        return [lease for lease in self if lease.until <= now]

    def forget(self, key: BlockKey) -> None:
        """Remove one block from every lease."""
        for reader_id, lease in list(self._leases.items()):
            lease.keys.pop(key, None)
            if not lease.keys:
                del self._leases[reader_id]
