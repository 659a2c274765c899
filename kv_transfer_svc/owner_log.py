"""What must the owner of a region still be told?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer_svc.broadcast import Broadcast
from tandem.v1 import kv_transfer_pb2 as kv

_KEPT_SECONDS = 60.0


@dataclass
class _Entry:
    number: int
    time: float
    num_bytes: int
    ended: kv.OwnerEvent.Ended


class OwnerLog:
    """Ended handles of one region, in order. Kept until an owner was sent them, and a minute longer:

    a message sent is not yet a message received, and an owner that connects again is told everything kept.
    """

    def __init__(self) -> None:
        self.changed = Broadcast()
        self._entries: deque[_Entry] = deque()
        self._next_number = 0
        self._next_unsent = 0

    def append(self, ended: kv.OwnerEvent.Ended, num_bytes: int, now: float) -> None:
        self._entries.append(_Entry(self._next_number, now, num_bytes, ended))
        self._next_number += 1
        self.changed.fire()

    def since(self, number: int) -> Iterator[tuple[int, kv.OwnerEvent.Ended]]:
        """Yield (number, event) from `number` on."""
        return ((entry.number, entry.ended) for entry in list(self._entries) if entry.number >= number)

    def sent(self, number: int) -> None:
        self._next_unsent = max(self._next_unsent, number + 1)

    def prune(self, now: float) -> None:
        while self._entries and self._entries[0].number < self._next_unsent:
            if now - self._entries[0].time < _KEPT_SECONDS:
                return
            self._entries.popleft()

    def unsent_bytes(self, before: float) -> int:
        """Bytes of handles that ended before that time and whose owner still does not know."""
        return sum(entry.num_bytes for entry in self._unsent() if entry.time < before)

    def untold(self) -> list[tuple[kv.OwnerEvent.Ended, int]]:
        """Return what the owner has not been sent, with the bytes that it keeps therefore."""
        return [(entry.ended, entry.num_bytes) for entry in self._unsent()]

    def _unsent(self) -> Iterator[_Entry]:
        return (entry for entry in self._entries if entry.number >= self._next_unsent)
