"""How do segments together keep blocks under a byte budget?

    oldest                                                newest
    ┌─────────┬─────────┬─────────┬─── ... ───┬─────────┬─────────┬ ─ ─ ─ ─ ┐
    │ victim  │ sealed  │ sealed  │           │ sealed  │ active  │ reserve │   all of it: at most the budget
    └────┬────┴─────────┴─────────┴─── ... ───┴─────────┴────▲────┴ ─ ─ ─ ─ ┘
         └── used since they were written: written again ────┘

When the active segment is full, the next one takes the reserve, and the oldest go until there is a reserve again. What
was used in them since it was written is written again (the second chance of CLOCK), the last used first and at most
half a segment: so the new one has room for half a segment of new blocks at least, however popular the old are. One
block moves per call of `tidy`, so that reads need not wait for all of them.

All methods belong to the tier's thread, but `index` and `num_bytes`, which anyone may read. After a restart a new
segment is begun: what another life wrote is never written to again.
"""

from __future__ import annotations

import errno
from collections import deque
from pathlib import Path

from kv_transfer_svc.blocks.keys import BlockKey
from kv_transfer_svc.disk.folder import OwnedFolder
from kv_transfer_svc.disk.index import Index, Place
from kv_transfer_svc.disk.record import RecordHeader, record_bytes
from kv_transfer_svc.disk.segment import Segment
from kv_transfer_svc.disk.stats import DiskCounters
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_MIN_SEGMENTS = 4
_SEGMENTS_PER_BUDGET = 32
_LEAST_SEGMENT_BYTES = 1 << 20
_MOST_SEGMENT_BYTES = 256 << 20


class SegmentLog:
    """The segments of one folder, and which of them comes next and goes next."""

    def __init__(self, folder: Path, budget_bytes: int, segment_bytes: int | None, counters: DiskCounters) -> None:
        self.budget_bytes = budget_bytes
        self.segment_bytes = segment_bytes or _fitting_segment_bytes(budget_bytes)
        if budget_bytes < _MIN_SEGMENTS * self.segment_bytes:
            raise InvalidRequest(
                f"a disk budget of {budget_bytes} bytes is less than {_MIN_SEGMENTS} segments of {self.segment_bytes}; "
                "raise the budget or turn the disk tier off"
            )
        self.index = Index()
        self.num_bytes = 0
        self._folder = OwnedFolder(folder)
        self._counters = counters
        self._segments: dict[int, Segment] = {}  # oldest first
        self._active: Segment | None = None
        self._next_number = 0
        self._victims: deque[Segment] = deque()
        self._moving: deque[tuple[BlockKey, Place]] = deque()
        self._rewrite_bytes_left = 0

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def open(self) -> None:
        """Lock the folder and rebuild the index. Raises InvalidRequest or Unavailable, see OwnedFolder.acquire."""
        self._folder.acquire()
        try:
            for segment in Segment.find_all(self._folder.path):
                self._next_number = segment.number + 1
                self._adopt(segment)
            while self._segments and self.num_bytes + 2 * self.segment_bytes > self.budget_bytes:
                self._remove(next(iter(self._segments.values())))  # the budget is less than last time
        except OSError as error:
            self.close()
            raise InvalidRequest(f"cannot use {self._folder.path} for KV blocks: {error}; name another one") from error
        log.info(
            "disk_tier_opened",
            folder=str(self._folder.path),
            num_blocks=len(self.index),
            num_bytes=self.num_bytes,
            num_discarded=self._counters.discarded,
        )

    def append(self, key: BlockKey, payload: memoryview, checksum: int) -> None:
        """Write a block and index it. Raises OSError: then nothing has changed."""
        active = self._with_room(record_bytes(len(payload)))
        self._put(active, key, payload, checksum)

    def read(self, key: BlockKey, into: memoryview | None) -> memoryview | None:
        """Return the verified payload of `key`, in `into` if given; None for a miss, `into` then holds anything.

        A record that is not whole, or not as long as `into`, is dropped; so is one that cannot be read, since a bad
        sector would be waited for again and again.
        """
        place = self.index.find(key)
        if place is None:
            return None
        payload = memoryview(bytearray(place.payload_bytes)) if into is None else into
        if self._verified(key, place, payload) is None:
            self.index.drop(key)
            return None
        self.index.use(key)
        return payload

    def tidy(self) -> bool:
        """Do one step of moving blocks out of the segments that go; return False if there was none to do."""
        if self._moving:
            self._move(*self._moving.popleft())
        elif self._victims:
            self._remove(self._victims.popleft())
        else:
            return False
        return True

    def close(self) -> None:
        """Let go of the files and the folder; the index is empty then."""
        if self._active is not None:
            self._active.seal()
            self._active = None
        self._folder.release()
        self.index.clear()

    def check(self) -> None:
        """Raise AssertionError unless index, segments and files agree and the budget is held."""
        self.index.check()
        files = {segment.number: segment.num_bytes for segment in Segment.find_all(self._folder.path)}
        assert files == {number: segment.num_bytes for number, segment in self._segments.items()}, "files and table"
        assert self.num_bytes == sum(files.values()) <= self.budget_bytes, "bytes counted, on disk and allowed"

    def _adopt(self, segment: Segment) -> None:
        """Take over a file of an earlier life: index its whole records, cut off a torn end, or delete it."""
        self._segments[segment.number] = segment
        self.num_bytes += segment.num_bytes
        try:
            found = segment.scan()
        except OSError as error:  # it takes room until it is the oldest
            self._counters.read_errors += 1
            log.warning("disk_segment_unreadable", path=str(segment.path), error=str(error))
            return
        self._counters.discarded += found.num_discarded
        for header in found.headers:
            self.index.add(header.key, Place(segment.number, header.offset, header.payload_bytes))
        if not found.headers:
            self._remove(segment)
        elif found.end < segment.num_bytes:
            self._cut(segment, found.end)

    def _cut(self, segment: Segment, end: int) -> None:
        torn_bytes = segment.num_bytes - end
        try:
            segment.cut(end)
        except OSError as error:  # it holds nothing that is served, only room
            log.warning("disk_segment_uncut", path=str(segment.path), error=str(error))
            return
        self.num_bytes -= torn_bytes

    def _with_room(self, num_bytes: int) -> Segment:
        if self._active is None or self._active.num_bytes + num_bytes > self.segment_bytes:
            while self.tidy():
                pass  # the thread tidies between writes, so there is rarely anything left here
            self._active = self._begin_segment()
            self._choose_victims(self._active)
        return self._active

    def _begin_segment(self) -> Segment:
        if self.num_bytes + self.segment_bytes > self.budget_bytes:  # segments that could not be deleted
            raise OSError(errno.ENOSPC, "no room in the budget of the disk tier")
        segment = Segment.create(self._folder.path, self._next_number)
        if self._active is not None:
            self._active.seal()
        self._segments[segment.number] = segment
        self._next_number += 1
        return segment

    def _choose_victims(self, active: Segment) -> None:
        self._rewrite_bytes_left = self.segment_bytes // 2
        too_many_bytes = self.num_bytes + 2 * self.segment_bytes - self.budget_bytes
        for segment in self._segments.values():
            if too_many_bytes <= 0 or segment is active:
                break
            too_many_bytes -= segment.num_bytes
            self._victims.append(segment)
            self._moving.extend(self.index.used_in(segment.number))

    def _move(self, key: BlockKey, place: Place) -> None:
        num_bytes = record_bytes(place.payload_bytes)
        active = self._active
        fits = active is not None and active.num_bytes + num_bytes <= self.segment_bytes
        if active is None or not fits or num_bytes > self._rewrite_bytes_left or self.index.find(key) != place:
            return
        payload = memoryview(bytearray(place.payload_bytes))
        checksum = self._verified(key, place, payload)
        if checksum is None:
            self.index.drop(key)
            return
        self._rewrite_bytes_left -= num_bytes
        try:
            self._put(active, key, payload, checksum, moved_from=place)
            self._counters.rewritten += 1
        except OSError as error:
            self._counters.write_errors += 1
            log.warning("disk_rewrite_failed", error=str(error))

    def _put(
        self, active: Segment, key: BlockKey, payload: memoryview, checksum: int, moved_from: Place | None = None
    ) -> None:
        offset = active.append(key, payload, checksum)
        self.num_bytes += record_bytes(len(payload))
        place = Place(active.number, offset, len(payload))
        if moved_from is None:
            self.index.add(key, place)
        else:
            self.index.move(key, moved_from, place)

    def _verified(self, key: BlockKey, place: Place, payload: memoryview) -> int | None:
        """Read into `payload` and return its checksum; None if it could not be read or is not what was written."""
        try:
            header = self._segments[place.segment].read(place.offset, payload)
        except OSError as error:
            self._counters.read_errors += 1
            log.warning("disk_read_failed", segment=place.segment, offset=place.offset, error=str(error))
            return None
        if header is not None and _tells_of(header, key, payload):
            return header.payload_checksum
        self._counters.disk_corrupt += 1
        log.warning("disk_corrupt", block=key.block_hash.hex(), segment=place.segment, offset=place.offset)
        return None

    def _remove(self, segment: Segment) -> None:
        self._counters.evicted += self.index.drop_segment(segment.number)
        try:
            segment.delete()
        except OSError as error:  # its bytes stay counted; it is the first to go next time
            log.warning("disk_segment_stays", path=str(segment.path), error=str(error))
            return
        del self._segments[segment.number]
        self.num_bytes -= segment.num_bytes


def _tells_of(header: RecordHeader, key: BlockKey, payload: memoryview) -> bool:
    is_asked_for = header.key == key and header.payload_bytes == len(payload)
    return is_asked_for and header.payload_checksum == block_checksum(payload)


def _fitting_segment_bytes(budget_bytes: int) -> int:
    return min(max(budget_bytes // _SEGMENTS_PER_BUDGET, _LEAST_SEGMENT_BYTES), _MOST_SEGMENT_BYTES)
