"""How is one segment file written, read, scanned and removed?

Appended to by one process until it is full, never changed after. Nothing is ever synced: this is a cache. A process
that is killed loses the record it was writing, since the page cache outlives it; a machine that loses power may lose
more. What is left torn by either fails a checksum and is not served.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kv_transfer_svc.blocks.keys import BlockKey
from kv_transfer_svc.disk.record import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    MAGIC,
    RecordHeader,
    pack_header,
    record_bytes,
    unpack_header,
)

_NAME = re.compile(r"segment-([0-9a-f]{12})\.tkv")
_SEARCH_BYTES = 1 << 18


@dataclass
class ScanResult:
    """What a scan found: whole headers in file order, how many bad stretches, and where the last good record ends."""

    headers: list[RecordHeader] = field(default_factory=list)
    num_discarded: int = 0
    end: int = 0


class Segment:
    """One segment file. Only its writer, if it has one, holds it open: a big budget must not eat all descriptors."""

    def __init__(self, folder: Path, number: int, num_bytes: int = 0) -> None:
        self.number = number
        self.path = folder / f"segment-{number:012x}.tkv"
        self.num_bytes = num_bytes
        self._writer: int | None = None

    @classmethod
    def create(cls, folder: Path, number: int) -> Segment:
        segment = cls(folder, number)
        segment._writer = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        return segment

    @classmethod
    def find_all(cls, folder: Path) -> list[Segment]:
        """Return the segments in `folder`, oldest first, as long as their files are."""
        names = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
        found = [cls(folder, int(match[1], 16), path.lstat().st_size) for path, match in names if match]
        return sorted(found, key=lambda segment: segment.number)

    def append(self, key: BlockKey, payload: memoryview, checksum: int) -> int:
        """Write a record and return its offset. Raises OSError, having taken back what was written of it."""
        assert self._writer is not None, f"{self.path} is sealed"
        offset = self.num_bytes
        header = pack_header(RecordHeader(key, self.number, offset, len(payload), checksum))
        num_bytes = record_bytes(len(payload))
        padding = bytes(num_bytes - HEADER_BYTES - len(payload))
        try:
            _write_all(self._writer, [memoryview(header), payload, memoryview(padding)], offset)
        except OSError:
            with suppress(OSError):  # if even this fails, the next record overwrites the rest, or a scan discards it
                os.ftruncate(self._writer, offset)
            raise
        self.num_bytes += num_bytes
        return offset

    def seal(self) -> None:
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None

    def read(self, offset: int, payload: memoryview) -> RecordHeader | None:
        """Read the record at `offset` straight into `payload` and return its header; None if it is not whole.

        Compare key, length and checksum before believing a byte. Raises OSError.
        """
        header = bytearray(HEADER_BYTES)
        file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            num_read = os.preadv(file, [header, payload], offset)
        finally:
            os.close(file)
        if num_read != HEADER_BYTES + len(payload):
            return None
        return unpack_header(header, self.number, offset)

    def scan(self) -> ScanResult:
        """Read the headers. Raises OSError.

        A record that reaches past the end of the file is torn, and the last. After a bad header nobody knows how long
        its record is: the next header that names the place it lies at is where records go on.
        """
        file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # or reading ahead would read all the payloads too
            return self._scan(file)
        finally:
            os.close(file)

    def _scan(self, file: int) -> ScanResult:
        found = ScanResult()
        offset = 0
        while offset < self.num_bytes:
            header = unpack_header(os.pread(file, HEADER_BYTES, offset), self.number, offset)
            if header is None:
                found.num_discarded += 1
                offset = self._find_header(file, offset + ALIGNMENT_BYTES)
            elif offset + header.record_bytes > self.num_bytes:
                found.num_discarded += 1
                break
            else:
                found.headers.append(header)
                offset = found.end = offset + header.record_bytes
        return found

    def _find_header(self, file: int, offset: int) -> int:
        """Return where the next good header lies, the end of the file if there is none."""
        for start in range(offset, self.num_bytes, _SEARCH_BYTES):
            for place in _places_of_magic(os.pread(file, _SEARCH_BYTES, start), start):
                if unpack_header(os.pread(file, HEADER_BYTES, place), self.number, place) is not None:
                    return place
        return self.num_bytes

    def cut(self, end: int) -> None:
        """Give back the bytes behind the last good record. Raises OSError."""
        os.truncate(self.path, end)
        self.num_bytes = end

    def delete(self) -> None:
        """Remove the file; that it is gone already is no error. Raises OSError."""
        self.seal()
        self.path.unlink(missing_ok=True)


def _places_of_magic(chunk: bytes, start: int) -> Iterator[int]:
    for index in range(0, len(chunk), ALIGNMENT_BYTES):
        if chunk.startswith(MAGIC, index):
            yield start + index


def _write_all(file: int, parts: list[memoryview], offset: int) -> None:
    """Write `parts` one after another. A disk that fills up writes a part first, and says why only when asked again."""
    while parts:
        written = os.pwritev(file, parts, offset)
        offset += written
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][written:]
