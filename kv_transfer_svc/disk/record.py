"""How does a KV block lie in a segment file, and how do we know that it is whole?

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

All numbers are little-endian. The header's checksum covers the payload's, so a payload cannot pass under another key.
A header names the place it lies at: bytes of one that turn up elsewhere (a stale tail, a payload that looks like a
header, a misdirected write) are not a record.

Aligned to 512, the smallest sector: a header never straddles two sectors of any disk, so a torn write leaves all of it
or none, and a scan that met a bad header knows where the next may begin. Pages of 4,096 would buy nothing more (we read
through the page cache and never map the file) and would cost a page for each block of a power-of-two size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kv_transfer_svc.blocks.keys import BlockKey
from tandem_runtime.kv.checksum import block_checksum

HEADER_BYTES = 128
ALIGNMENT_BYTES = 512
MAGIC = b"TKVBLK\x00\x01"
"""Ends in the version. A segment of another version holds no records of ours and is dropped: it is a cache."""

_FIELDS = struct.Struct("<8sQQ16sI4x16sQQ40x")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record says of itself: whose payload it is, where it lies, how long it is and what its bytes hash to."""

    key: BlockKey
    segment: int
    offset: int
    payload_bytes: int
    payload_checksum: int

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.payload_bytes)


def record_bytes(payload_bytes: int) -> int:
    """Return what a payload takes in a file, with header and padding."""
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
    """Return what `raw`, read at `offset` of `segment`, says; None if that is not a whole header of this place."""
    if len(raw) != HEADER_BYTES or raw[: len(MAGIC)] != MAGIC:
        return None
    if block_checksum(bytes(raw[: _FIELDS.size])) != _CHECKSUM.unpack_from(raw, _FIELDS.size)[0]:
        return None
    _, in_segment, at_offset, digest, group, block_hash, payload_bytes, checksum = _FIELDS.unpack_from(raw)
    if (in_segment, at_offset) != (segment, offset):
        return None
    return RecordHeader(BlockKey(digest, group, block_hash), segment, offset, payload_bytes, checksum)
