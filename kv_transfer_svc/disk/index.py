"""Maps block keys to places on disk.

Both the event loop and the tier's thread change the index. The lock is held for dictionary work, never during I/O.
"""

from __future__ import annotations

import threading

import msgspec

from kv_transfer_svc.blocks.block import BlockKey
from tandem_runtime.kv.known_blocks import BlockCounters


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a block's record lies; garbage collection does not visit it (see `Block`)."""

    segment: int
    offset: int
    payload_bytes: int


class BlockIndex:
    """Places by key and by segment, and which blocks were used since they were written."""

    def __init__(self) -> None:
        self.counters: BlockCounters | None = None
        self._lock = threading.Lock()
        self._places: dict[BlockKey, Place] = {}
        self._of_segment: dict[int, dict[BlockKey, Place]] = {}
        self._last_use: dict[BlockKey, int] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._places

    def find(self, key: BlockKey) -> Place | None:
        return self._places.get(key)

    def add(self, key: BlockKey, place: Place) -> None:
        """Record that `key` lies at `place` and nowhere else, and count `key` as unused."""
        with self._lock:
            self._add(key, place)

    def move(self, key: BlockKey, old: Place, new: Place) -> bool:
        """As `add`, unless `key` was dropped or written elsewhere since the caller saw `old`."""
        with self._lock:
            if self._places.get(key) != old:
                return False
            self._add(key, new)
            return True

    def use(self, key: BlockKey) -> None:
        with self._lock:
            if key in self._places:
                self._clock += 1
                self._last_use[key] = self._clock

    def drop(self, key: BlockKey) -> bool:
        with self._lock:
            return self._drop(key)

    def drop_segment(self, number: int) -> int:
        """Drop the blocks that still lie in segment `number`; return their number."""
        with self._lock:
            keys = list(self._of_segment.get(number, ()))
            for key in keys:
                self._drop(key)
            return len(keys)

    def used_in(self, number: int) -> list[tuple[BlockKey, Place]]:
        """Return the blocks of segment `number` that were used since they were written, last used first."""
        with self._lock:
            blocks = self._of_segment.get(number, {}).items()
            used = [(key, place) for key, place in blocks if key in self._last_use]
            return sorted(used, key=lambda block: -self._last_use[block[0]])

    def clear(self) -> None:
        with self._lock:
            for key in list(self._places):
                self._drop(key)

    def check(self) -> None:
        """Raise AssertionError unless both views agree."""
        with self._lock:
            by_segment = {key: place for places in self._of_segment.values() for key, place in places.items()}
            assert by_segment == self._places, "the index by segment and the index by key differ"
            assert sum(map(len, self._of_segment.values())) == len(self._places), "a block lies in two segments"
            assert self._last_use.keys() <= self._places.keys(), "a block is marked as used and has no place"

    def _add(self, key: BlockKey, place: Place) -> None:
        if self.counters is not None:
            self.counters.add(key.layout_digest, key.block_hash)  # before the old place is subtracted
        self._drop(key)
        self._places[key] = place
        self._of_segment.setdefault(place.segment, {})[key] = place

    def _drop(self, key: BlockKey) -> bool:
        place = self._places.pop(key, None)
        if place is None:
            return False
        self._last_use.pop(key, None)
        places = self._of_segment[place.segment]
        del places[key]
        if not places:
            del self._of_segment[place.segment]
        if self.counters is not None:
            self.counters.remove(key.layout_digest, key.block_hash)
        return True
