"""Who reads which blocks, and until when?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kv_transfer_svc.blocks.keys import BlockKey


@dataclass(slots=True)
class Lease:
    """What one reader holds; all of it ends at once. Times are the caller's clock, in seconds."""

    until: float
    keys: dict[BlockKey, None] = field(default_factory=dict)


class Leases:
    """Leases by reader."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def by_reader(self) -> list[tuple[str, Lease]]:
        return list(self._leases.items())

    def open(self, reader_id: str, keys: Sequence[BlockKey], until: float) -> list[BlockKey]:
        """Add keys to a reader's lease and extend it, never shorten it; return those that the reader did not hold."""
        if not keys:
            return []
        lease = self._leases.setdefault(reader_id, Lease(until))
        lease.until = max(lease.until, until)
        new_keys = [key for key in dict.fromkeys(keys) if key not in lease.keys]
        lease.keys.update(dict.fromkeys(new_keys))
        return new_keys

    def end(self, reader_id: str) -> list[BlockKey]:
        """End a reader's lease and return what it held; nothing if it has none."""
        lease = self._leases.pop(reader_id, None)
        return list(lease.keys) if lease is not None else []

    def lapsed(self, now: float) -> list[str]:
        """Return the readers whose lease is over at `now`."""
        return [reader_id for reader_id, lease in self._leases.items() if lease.until <= now]

    def over(self, now: float) -> list[Lease]:
        """Return the leases that are over at `now`."""
        return [lease for lease in self if lease.until <= now]

    def forget(self, key: BlockKey) -> None:
        """Take one block out of every lease."""
        for reader_id, lease in list(self._leases.items()):
            lease.keys.pop(key, None)
            if not lease.keys:
                del self._leases[reader_id]
