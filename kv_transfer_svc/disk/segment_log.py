"""Keeps blocks in segment files under a byte budget.

    oldest                                                newest
    ┌─────────┬─────────┬─────────┬─── ... ───┬─────────┬─────────┬ ─ ─ ─ ─ ┐
    │ victim  │ sealed  │ sealed  │           │ sealed  │ active  │ reserve │   together at most the budget
    └────┬────┴─────────┴─────────┴─── ... ───┴─────────┴────▲────┴ ─ ─ ─ ─ ┘
         └── used since written: rewritten ──────────────────┘

When the active segment is full, the next one takes the reserve, and the oldest segments are deleted until there is a
reserve again. Blocks in them that were used since they were written are rewritten (the second chance of CLOCK): the
last used first, at most half a segment. So at least half of the new segment is left for new blocks. One block moves per
call of `tidy`, so that reads need not wait for all of them.

All methods belong to the tier's thread, except `index` and `num_bytes`, which any thread may read. After a restart a
new segment is begun: a file of an earlier process is never written to again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kv_transfer_svc.blocks.block import BlockKey
from kv_transfer_svc.disk.index import BlockIndex, Place
from kv_transfer_svc.disk.segment import RecordHeader, Segment, record_bytes
from tandem_machine.lock_file import open_lock
from tandem_runtime.errors import InvalidRequest, Unavailable
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_OWN_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_MIN_SEGMENTS = 4
_SEGMENTS_PER_BUDGET = 32
_MIN_SEGMENT_BYTES = 1 << 20
_MAX_SEGMENT_BYTES = 256 << 20


class VerifiedBlock(NamedTuple):
    """A block read from disk, and the checksum that its bytes were compared with."""

    payload: memoryview
    checksum: int


@dataclass
class DiskCounters:
    """Counts since the tier was created. Each is written by one thread and read by any."""

    hits: int = 0
    misses: int = 0
    disk_corrupt: int = 0
    """Records that failed verification: dropped and reported as misses."""
    discarded: int = 0
    """Torn or bad stretches found while the index was rebuilt."""
    read_errors: int = 0
    refused_reads: int = 0
    """Blocks requested while the read queue was full: reported as misses, not counted in `misses`."""
    written: int = 0
    written_bytes: int = 0
    duplicates: int = 0
    refused_writes: int = 0
    """Blocks refused: the write queue was full, the tier closed, or the block longer than a segment."""
    put_corrupt: int = 0
    """Blocks whose bytes did not match their checksum when they were about to be written."""
    write_errors: int = 0
    rewritten: int = 0
    """Blocks with a second chance: rewritten as their segment was deleted."""
    evicted: int = 0


class SegmentLog:
    """The segments of one folder: the active one, and the next ones to delete."""

    def __init__(self, folder: Path, budget_bytes: int, segment_bytes: int | None, counters: DiskCounters) -> None:
        self.budget_bytes = budget_bytes
        self.segment_bytes = segment_bytes or _default_segment_bytes(budget_bytes)
        if budget_bytes < _MIN_SEGMENTS * self.segment_bytes:
            raise InvalidRequest(
                f"a disk budget of {budget_bytes} bytes is less than {_MIN_SEGMENTS} segments of {self.segment_bytes}; "
                "raise the budget or turn the disk tier off"
            )
        self.index = BlockIndex()
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
            for segment in list(self._segments.values()):  # a file that cannot be deleted is tried once
                if self.num_bytes + 2 * self.segment_bytes <= self.budget_bytes:
                    break
                self._remove(segment)  # the budget is smaller than last time
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
        """Write a block and index it. Raises OSError, and then nothing has changed."""
        active = self._segment_for(record_bytes(len(payload)))
        self._put(active, key, payload, checksum)

    def read(self, key: BlockKey, into: memoryview | None) -> VerifiedBlock | None:
        """Return the block of `key`, read into `into` if given; None for a miss, after which `into` is undefined.

        A record that is not whole, or not as long as `into`, is dropped. A record that cannot be read is dropped too:
        otherwise every later read would wait for the bad sector. While this process has no descriptor or memory left,
        nothing is dropped.
        """
        place = self.index.find(key)
        if place is None:
            return None
        payload = memoryview(bytearray(place.payload_bytes)) if into is None else into
        try:
            checksum = self._verified(key, place, payload)
        except OSError:
            return None
        if checksum is None:
            self.index.drop(key)
            return None
        self.index.use(key)
        return VerifiedBlock(payload, checksum)

    def tidy(self) -> bool:
        """Do one step of moving blocks out of the segments to delete; return False without work."""
        if self._moving:
            self._move(*self._moving.popleft())
        elif self._victims:
            self._remove(self._victims.popleft())
        else:
            return False
        return True

    def close(self) -> None:
        """Close the files, release the folder and empty the index."""
        if self._active is not None:
            self._active.seal()
            self._active = None
        self._folder.release()
        self.index.clear()

    def check(self) -> None:
        """Raise AssertionError unless index, segments and files agree and the budget holds."""
        self.index.check()
        files = {segment.number: segment.num_bytes for segment in Segment.find_all(self._folder.path)}
        assert files == {number: segment.num_bytes for number, segment in self._segments.items()}, (
            "files and table differ"
        )
        assert self.num_bytes == sum(files.values()) <= self.budget_bytes, (
            "counted bytes, bytes on disk and budget disagree"
        )

    def _adopt(self, segment: Segment) -> None:
        """Take over a file of an earlier process: index its whole records, cut off a torn end, or delete the file."""
        self._segments[segment.number] = segment
        self.num_bytes += segment.num_bytes
        try:
            found = segment.scan()
        except OSError as error:  # counts against the budget until it is the oldest
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
        except OSError as error:  # the torn end is never served and only takes space
            log.warning("disk_segment_not_truncated", path=str(segment.path), error=str(error))
            return
        self.num_bytes -= torn_bytes

    def _segment_for(self, num_bytes: int) -> Segment:
        if self._active is None or self._active.num_bytes + num_bytes > self.segment_bytes:
            while self.tidy():
                pass  # the thread tidies between writes, so little is left here
            self._active = self._begin_segment()
            self._choose_victims(self._active)
        return self._active

    def _begin_segment(self) -> Segment:
        if self.num_bytes + self.segment_bytes > self.budget_bytes:  # segments that could not be deleted
            raise OSError(errno.ENOSPC, "the budget of the disk tier is used up")
        segment = Segment.create(self._folder.path, self._next_number)
        if self._active is not None:
            self._active.seal()
        self._segments[segment.number] = segment
        self._next_number += 1
        return segment

    def _choose_victims(self, active: Segment) -> None:
        self._rewrite_bytes_left = self.segment_bytes // 2
        excess_bytes = self.num_bytes + 2 * self.segment_bytes - self.budget_bytes
        for segment in self._segments.values():
            if excess_bytes <= 0 or segment is active:
                break
            excess_bytes -= segment.num_bytes
            self._victims.append(segment)
            self._moving.extend(self.index.used_in(segment.number))

    def _move(self, key: BlockKey, place: Place) -> None:
        num_bytes = record_bytes(place.payload_bytes)
        active = self._active
        fits = active is not None and active.num_bytes + num_bytes <= self.segment_bytes
        if active is None or not fits or num_bytes > self._rewrite_bytes_left or self.index.find(key) != place:
            return
        payload = memoryview(bytearray(place.payload_bytes))
        try:
            checksum = self._verified(key, place, payload)
            if checksum is None:
                self.index.drop(key)
                return
            self._rewrite_bytes_left -= num_bytes
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
        """Read into `payload` and return its checksum; None if the read fails or the bytes are not what was written.

        Raise OSError where this process lacks a descriptor or memory: the record may be well.
        """
        try:
            header = self._segments[place.segment].read(place.offset, payload)
        except OSError as error:
            self._counters.read_errors += 1
            log.warning("disk_read_failed", segment=place.segment, offset=place.offset, error=str(error))
            if error.errno in _OWN_LACKS:
                raise
            return None
        if header is not None and _matches(header, key, payload):
            return header.payload_checksum
        self._counters.disk_corrupt += 1
        log.warning("disk_corrupt", block=key.block_hash.hex(), segment=place.segment, offset=place.offset)
        return None

    def _remove(self, segment: Segment) -> None:
        self._counters.evicted += self.index.drop_segment(segment.number)
        try:
            segment.delete()
        except OSError as error:  # its bytes stay counted; the next round tries again first
            log.warning("disk_segment_not_deleted", path=str(segment.path), error=str(error))
            return
        del self._segments[segment.number]
        self.num_bytes -= segment.num_bytes


def _matches(header: RecordHeader, key: BlockKey, payload: memoryview) -> bool:
    is_requested = header.key == key and header.payload_bytes == len(payload)
    return is_requested and header.payload_checksum == block_checksum(payload)


def _default_segment_bytes(budget_bytes: int) -> int:
    return min(max(budget_bytes // _SEGMENTS_PER_BUDGET, _MIN_SEGMENT_BYTES), _MAX_SEGMENT_BYTES)


class OwnedFolder:
    """A folder of mode 0700 with one owner process. The kernel releases the lock however the owner dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def acquire(self) -> None:
        """Create and lock the folder.

        Raises InvalidRequest if the folder cannot be created or written or belongs to another user, Unavailable if
        another process owns the folder.
        """
        assert self._lock is None, f"{self.path} is locked already"
        try:
            _create_private(self.path)
            lock = open_lock(self.path / "owner.lock")
        except OSError as error:
            raise InvalidRequest(
                f"cannot keep KV blocks in {self.path}: {error}; name a writable folder, or turn the disk tier off"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise Unavailable(
                f"{self.path} belongs to another KV service that is running; give this one a folder of its own"
            ) from error
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _create_private(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise InvalidRequest(
            f"{path} is not a folder of user {os.getuid()} (owner: {status.st_uid}), "
            "who could read or replace KV blocks in it; name another one"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)
