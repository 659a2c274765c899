"""One segment file and the records in it: write, read, scan, cut, delete.

One process appends to a segment until the segment is full; after that the file never changes. Nothing is synced: this
is a cache. A process that is killed loses the record it was writing, since the page cache outlives the process. A
machine that loses power may lose more. Torn records fail a checksum and are not served.

    a record, at a multiple of 512 bytes
    ┌──────────────────────────── header, 128 bytes ────────────────────────────┬─────────┬─────────┐
    │   0  magic and version          8  "TKVBLK", 0, 1                         │         │         │
    │   8  segment number             8                                         │         │         │
    │  16  offset in the segment      8                                         │         │         │
    │  24  layout digest             16  ┐                                      │         │ zeros,  │
    │  40  group index                4  ├ the key                              │ payload │ up to a │
    │  44  zeros                      4  │                                      │         │ multiple│
    │  48  block hash                16  ┘                                      │         │ of 512  │
    │  64  payload bytes              8                                         │         │         │
    │  72  xxh3-64 of the payload     8                                         │         │         │
    │  80  zeros                     40                                         │         │         │
    │ 120  xxh3-64 of bytes 0 to 119  8                                         │         │         │
    └───────────────────────────────────────────────────────────────────────────┴─────────┴─────────┘

All numbers are little-endian. The header's checksum covers the payload's checksum, so a payload cannot pass under
another key. A header contains its own segment and offset. Bytes of a header found elsewhere (a stale tail, a payload
that looks like a header, a misdirected write) are not a record.

Records are aligned to 512 bytes, the smallest sector, so a header never straddles two sectors of any disk. A torn write
leaves the whole header or none of it, and a scan that meets a bad header knows where the next one may begin. Alignment
to 4,096 bytes would gain nothing (files are read through the page cache and never mapped) and would cost one page for
each block whose size is a power of two.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kv_transfer_svc.blocks.block import BlockKey
from tandem_runtime.kv.checksum import block_checksum

HEADER_BYTES = 128
ALIGNMENT_BYTES = 512
MAGIC = b"TKVBLK\x00\x01"
"""Ends in the version. A segment of another version has no valid records and is dropped: this is a cache."""

_FIELDS = struct.Struct("<8sQQ16sI4x16sQQ40x")
_CHECKSUM = struct.Struct("<Q")

_NAME = re.compile(r"segment-([0-9a-f]{12})\.tkv")
_FIRST_SEARCH_BYTES = 1 << 12
_SEARCH_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The header of a record: key, place, payload length and payload checksum."""

    key: BlockKey
    segment: int
    offset: int
    payload_bytes: int
    payload_checksum: int

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.payload_bytes)


def record_bytes(payload_bytes: int) -> int:
    """Return the bytes of a payload in a file, with header and padding."""
    return -(-(HEADER_BYTES + payload_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def pack_header(header: RecordHeader) -> bytes:
    fields = _FIELDS.pack(
        MAGIC,
        header.segment,
        header.offset,
        header.key.layout_digest,
        header.key.group,
        header.key.block_hash,
        header.payload_bytes,
        header.payload_checksum,
    )
    return fields + _CHECKSUM.pack(block_checksum(fields))


def unpack_header(raw: bytes | bytearray, segment: int, offset: int) -> RecordHeader | None:
    """Parse `raw`, read at `offset` of `segment`; None if `raw` is not a whole header of this place."""
    if len(raw) != HEADER_BYTES or raw[: len(MAGIC)] != MAGIC:
        return None
    if block_checksum(bytes(raw[: _FIELDS.size])) != _CHECKSUM.unpack_from(raw, _FIELDS.size)[0]:
        return None
    _, in_segment, at_offset, digest, group, block_hash, payload_bytes, checksum = _FIELDS.unpack_from(raw)
    if (in_segment, at_offset) != (segment, offset):
        return None
    return RecordHeader(BlockKey(digest, group, block_hash), segment, offset, payload_bytes, checksum)


@dataclass
class ScanResult:
    """Result of a scan: whole headers in file order, number of bad stretches, and the end of the last good record."""

    headers: list[RecordHeader] = field(default_factory=list)
    num_discarded: int = 0
    end: int = 0


class Segment:
    """One segment file. Only the writer keeps the file open: a large budget must not use up all descriptors."""

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
        """Return the segments in `folder`, oldest first, each with the size of its file."""
        names = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
        found = [cls(folder, int(match[1], 16), path.lstat().st_size) for path, match in names if match]
        return sorted(found, key=lambda segment: segment.number)

    def append(self, key: BlockKey, payload: memoryview, checksum: int) -> int:
        """Write a record and return its offset. Raises OSError after removing what was written of the record."""
        assert self._writer is not None, f"{self.path} is sealed"
        offset = self.num_bytes
        header = pack_header(RecordHeader(key, self.number, offset, len(payload), checksum))
        num_bytes = record_bytes(len(payload))
        padding = bytes(num_bytes - HEADER_BYTES - len(payload))
        try:
            _write_all(self._writer, [memoryview(header), payload, memoryview(padding)], offset)
        except OSError:
            with suppress(OSError):  # then the next record overwrites the rest, or a scan discards the rest
                os.ftruncate(self._writer, offset)
            raise
        self.num_bytes += num_bytes
        return offset

    def seal(self) -> None:
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None

    def read(self, offset: int, payload: memoryview) -> RecordHeader | None:
        """Read the record at `offset` straight into `payload` and return its header; None if the record is not whole.

        The caller compares key, length and checksum before using a byte. Raises OSError.
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

        A record that reaches past the end of the file is torn, and is the last. The length of a record with a bad
        header is unknown: the scan continues at the next header that names its own place.
        """
        file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # without this, read-ahead would read all payloads too
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
        """Return the offset of the next good header, or the end of the file."""
        num_bytes = _FIRST_SEARCH_BYTES  # grows, so that many short bad stretches do not read the file many times
        while offset < self.num_bytes:
            for candidate in _offsets_of_magic(os.pread(file, num_bytes, offset), offset):
                if unpack_header(os.pread(file, HEADER_BYTES, candidate), self.number, candidate) is not None:
                    return candidate
            offset += num_bytes
            num_bytes = min(2 * num_bytes, _SEARCH_BYTES)
        return self.num_bytes

    def cut(self, end: int) -> None:
        """Cut off the bytes behind the last good record. Raises OSError."""
        os.truncate(self.path, end)
        self.num_bytes = end

    def delete(self) -> None:
        """Remove the file; a missing file is no error. Raises OSError."""
        self.seal()
        self.path.unlink(missing_ok=True)


def _offsets_of_magic(chunk: bytes, start: int) -> Iterator[int]:
    for index in range(0, len(chunk), ALIGNMENT_BYTES):
        if chunk.startswith(MAGIC, index):
            yield start + index


def _write_all(file: int, parts: list[memoryview], offset: int) -> None:
    """Write `parts` one after another. A full disk first writes a part, and reports the error at the next call."""
    while parts:
        written = os.pwritev(file, parts, offset)
        offset += written
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][written:]
