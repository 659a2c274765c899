"""Tests of records and segment files: pack, scan, torn and damaged records."""

from __future__ import annotations

import os
from pathlib import Path

from kv_transfer_svc.disk.segment import (
    HEADER_BYTES,
    RecordHeader,
    Segment,
    pack_header,
    record_bytes,
    unpack_header,
)
from tandem_runtime.kv.checksum import block_checksum
from tests.kv_transfer_svc.disk.blocks import a_key, a_payload


def test_a_header_says_what_was_packed_and_only_at_its_place() -> None:
    header = RecordHeader(a_key(7), segment=3, offset=512, payload_bytes=100, payload_checksum=(1 << 64) - 1)
    raw = pack_header(header)
    assert len(raw) == HEADER_BYTES
    assert unpack_header(raw, 3, 512) == header
    assert unpack_header(raw, 3, 1024) is None
    assert unpack_header(raw, 4, 512) is None
    assert unpack_header(raw[:-1], 3, 512) is None


def test_no_flipped_bit_of_a_header_goes_unseen() -> None:
    raw = bytearray(pack_header(RecordHeader(a_key(7), 3, 512, 100, 99)))
    for bit in range(8 * HEADER_BYTES):
        raw[bit // 8] ^= 1 << bit % 8
        assert unpack_header(raw, 3, 512) is None, f"bit {bit}"
        raw[bit // 8] ^= 1 << bit % 8


def test_records_end_at_a_sector() -> None:
    assert [record_bytes(size) for size in (0, 384, 385, 4096)] == [512, 512, 1024, 4608]


def test_a_scan_finds_what_was_appended(tmp_path: Path) -> None:
    segment = _written(tmp_path, sizes=(384, 1000, 0))
    found = segment.scan()
    assert [header.key for header in found.headers] == [a_key(0), a_key(1), a_key(2)]
    assert [header.offset for header in found.headers] == [0, 512, 2048]
    assert (found.end, found.num_discarded) == (2560, 0)
    assert segment.path.stat().st_mode & 0o777 == 0o600


def test_a_tail_torn_at_any_byte_is_discarded_and_nothing_else(tmp_path: Path) -> None:
    whole = _written(tmp_path, sizes=(384, 384, 384))
    for end in range(1024, 1536):
        os.truncate(whole.path, end)
        (segment,) = Segment.find_all(tmp_path)
        found = segment.scan()
        assert [header.key for header in found.headers] == [a_key(0), a_key(1)]
        assert (found.end, found.num_discarded) == (1024, int(end > 1024))
        os.truncate(whole.path, 1536)


def test_behind_a_bad_header_records_go_on(tmp_path: Path) -> None:
    segment = _written(tmp_path, sizes=(384, 3000, 384))
    _flip(segment.path, 512 + 64)  # the length of the second record
    found = segment.scan()
    assert [header.key for header in found.headers] == [a_key(0), a_key(2)]
    assert found.num_discarded == 1


def test_a_hole_in_the_middle_is_discarded(tmp_path: Path) -> None:
    segment = _written(tmp_path, sizes=(384, 3000, 384))
    with segment.path.open("r+b") as file:
        file.seek(512)
        file.write(bytes(3584))
    assert [header.key for header in segment.scan().headers] == [a_key(0), a_key(2)]


def test_a_payload_that_holds_a_record_is_not_taken_for_one(tmp_path: Path) -> None:
    inner = _written(tmp_path, sizes=(384, 384)).path.read_bytes()
    segment = Segment.create(tmp_path, 2)
    payload = bytes(384) + inner  # so that it lies at a sector
    segment.append(a_key(9), memoryview(payload), block_checksum(payload))
    segment.append(a_key(10), memoryview(b"next"), block_checksum(b"next"))
    _flip(segment.path, 0)
    assert [header.key for header in segment.scan().headers] == [a_key(10)]


def test_a_bad_payload_is_skipped_by_its_length(tmp_path: Path) -> None:
    segment = _written(tmp_path, sizes=(384, 3000, 384))
    _flip(segment.path, 512 + 500)
    assert [header.key for header in segment.scan().headers] == [a_key(0), a_key(1), a_key(2)]
    payload = memoryview(bytearray(3000))
    header = segment.read(512, payload)
    assert header is not None
    assert block_checksum(payload) != header.payload_checksum


def test_a_read_lands_where_the_caller_wants_it(tmp_path: Path) -> None:
    segment = _written(tmp_path, sizes=(384, 1000))
    pool = bytearray(4096)
    header = segment.read(512, memoryview(pool)[100:1100])
    assert header is not None and header.key == a_key(1)
    assert pool == bytes(100) + a_payload(1, 1000) + bytes(4096 - 1100)


def _written(folder: Path, sizes: tuple[int, ...]) -> Segment:
    segment = Segment.create(folder, 1)
    for number, size in enumerate(sizes):
        payload = a_payload(number, size)
        segment.append(a_key(number), memoryview(payload), block_checksum(payload))
    segment.seal()
    return segment


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
