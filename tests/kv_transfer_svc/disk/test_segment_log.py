"""Tests of the segment log.

Eight records of 512 bytes fill a segment of 4,096 bytes. A budget of four segments keeps two full segments when a new
one begins.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterable
from pathlib import Path

import pytest

from kv_transfer_svc.disk.segment import Segment
from kv_transfer_svc.disk.segment_log import DiskCounters, SegmentLog
from tandem_runtime.errors import InvalidRequest, Unavailable
from tandem_runtime.kv.checksum import block_checksum
from tests.kv_transfer_svc.disk.blocks import a_key, a_payload
from tests.tandem_machine.test_lock_file import make_read_only

_SEGMENT_BYTES = 8 * 512


def test_the_oldest_segment_goes_when_there_is_no_room_for_another(tmp_path: Path) -> None:
    log, counters = _opened(tmp_path)
    _append(log, range(24))
    assert _found(log, range(24)) == list(range(24))
    log, counters = _reopened(log, tmp_path)  # forgets what was used
    _append(log, range(24, 32))
    _tidy(log)
    assert [number for number in range(32) if a_key(number) in log.index] == list(range(8, 32))
    assert counters.evicted == 8
    log.check()


def test_the_budget_is_held_after_every_write(tmp_path: Path) -> None:
    log, _ = _opened(tmp_path)
    for number in range(200):
        _append(log, [number])
        _found(log, [max(0, number - 9)])
        log.check()
        while log.tidy():
            log.check()
    assert log.num_bytes > log.budget_bytes // 2


def test_what_was_used_since_it_was_written_gets_a_second_chance_and_no_third(tmp_path: Path) -> None:
    log, counters = _opened(tmp_path)
    _append(log, range(24))
    assert _found(log, [5, 2]) == [5, 2]
    _append(log, [24])  # begins segment four: segment one is deleted
    _tidy(log)
    assert [number for number in range(8) if a_key(number) in log.index] == [2, 5]
    assert (counters.rewritten, counters.evicted) == (2, 6)
    _append(log, range(25, 46))  # 5 fill segment four, 8 each five and six, none of them used
    _tidy(log)
    assert a_key(2) in log.index
    _append(log, range(46, 60))
    _tidy(log)
    assert [number for number in range(8) if a_key(number) in log.index] == []
    log.check()


def test_at_most_half_a_segment_is_written_again_the_last_used_first(tmp_path: Path) -> None:
    log, counters = _opened(tmp_path)
    _append(log, range(24))
    _found(log, [7, 1, 6, 2, 5, 3, 4, 0])
    _append(log, [24])
    _tidy(log)
    assert [number for number in range(8) if a_key(number) in log.index] == [0, 3, 4, 5]
    assert (counters.rewritten, counters.evicted) == (4, 4)


def test_a_block_can_be_read_while_its_segment_goes(tmp_path: Path) -> None:
    log, _ = _opened(tmp_path)
    _append(log, range(24))
    _found(log, [0, 1])
    _append(log, [24])
    assert log.tidy()  # one block has moved, nothing is deleted
    assert _found(log, range(8)) == list(range(8))


def test_what_was_moved_is_found_once_after_a_kill_between_move_and_delete(tmp_path: Path) -> None:
    log, _ = _opened(tmp_path)
    _append(log, range(24))
    _found(log, [0, 1])
    _append(log, [24])
    assert log.tidy() and log.tidy()  # both have moved, their old segment is still there
    log, _ = _reopened(log, tmp_path)
    assert _found(log, [0, 1]) == [0, 1]
    log.check()


def test_a_smaller_budget_after_a_restart_lets_the_oldest_go(tmp_path: Path) -> None:
    log, _ = _opened(tmp_path, num_segments=8)
    _append(log, range(48))
    log, _ = _reopened(log, tmp_path, num_segments=4)
    assert [number for number in range(48) if a_key(number) in log.index] == list(range(32, 48))
    log.check()


def test_a_bit_flipped_in_any_byte_of_a_record_is_never_served(tmp_path: Path) -> None:
    log, counters = _opened(tmp_path)
    payload = a_payload(0, 40)
    (path, record) = _only_record(log, tmp_path, payload)
    for index in range(128 + 40):
        flipped = bytearray(record)
        flipped[index] ^= 1 << index * 5 % 8
        path.write_bytes(flipped)
        place = log.index.find(a_key(0))
        assert place is not None
        assert log.read(a_key(0), None) is None, f"byte {index}"
        assert a_key(0) not in log.index
        log.index.add(a_key(0), place)
    assert counters.disk_corrupt == 128 + 40
    path.write_bytes(record)
    block = log.read(a_key(0), None)
    assert block is not None and bytes(block.payload) == payload


@pytest.mark.parametrize("offset", [0, 8, 30, 64, 72, 127])
def test_a_header_that_turned_bad_is_counted_at_the_next_start(tmp_path: Path, offset: int) -> None:
    log, _ = _opened(tmp_path)
    (path, record) = _only_record(log, tmp_path, a_payload(0))
    log.close()
    flipped = bytearray(record)
    flipped[offset] ^= 1
    path.write_bytes(flipped)
    log, counters = _opened(tmp_path)
    assert counters.discarded == 1
    assert len(log.index) == 0
    assert not path.exists()  # the segment held nothing else
    log.check()


def test_a_torn_tail_is_cut_off_at_the_next_start(tmp_path: Path) -> None:
    log, _ = _opened(tmp_path)
    _append(log, range(3))
    log.close()
    os.truncate(tmp_path / "segment-000000000000.tkv", 1300)
    log, counters = _opened(tmp_path)
    assert _found(log, range(3)) == [0, 1]
    assert (counters.discarded, log.num_bytes) == (1, 1024)
    log.check()


def test_a_payload_of_another_length_than_asked_for_is_a_miss(tmp_path: Path) -> None:
    log, counters = _opened(tmp_path)
    _append(log, [0])
    assert log.read(a_key(0), memoryview(bytearray(100))) is None
    assert counters.disk_corrupt == 1


def test_a_block_that_no_descriptor_is_left_for_is_found_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = _opened(tmp_path)
    _append(log, range(8))
    with monkeypatch.context() as used_up:
        used_up.setattr(os, "open", _no_descriptor)
        assert _found(log, [3]) == []
    assert _found(log, [3]) == [3]


def test_a_segment_that_vanished_is_a_counted_miss(tmp_path: Path) -> None:
    log, counters = _opened(tmp_path)
    _append(log, range(8))
    (tmp_path / "segment-000000000000.tkv").unlink()
    assert _found(log, [3]) == []
    assert counters.read_errors == 1
    _append(log, range(8, 64))  # and goes on
    _tidy(log)
    assert _found(log, [63]) == [63]
    log.check()


def test_a_segment_that_cannot_be_scanned_goes_when_it_is_the_oldest(tmp_path: Path) -> None:
    (tmp_path / "segment-000000000000.tkv").symlink_to("/dev/null")
    log, counters = _opened(tmp_path)
    assert counters.read_errors == 1
    _append(log, range(64))
    _tidy(log)
    assert not (tmp_path / "segment-000000000000.tkv").is_symlink()


def test_a_file_that_may_not_grow_fails_one_write_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    log, counters = _opened(tmp_path)
    _append(log, [0])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))  # in the middle of the second record
    try:
        with pytest.raises(OSError) as failed:
            _append(log, [1])
        assert failed.value.errno == errno.EFBIG
        log.check()
        assert _found(log, [0, 1]) == [0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    _append(log, [1])
    log, counters = _reopened(log, tmp_path)
    assert _found(log, [0, 1]) == [0, 1]
    assert counters.discarded == 0


def test_a_move_that_fails_loses_that_block_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, counters = _opened(tmp_path)
    _append(log, range(24))
    _found(log, [0, 1])
    _append(log, [24])
    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, "pwritev", _no_space)
        assert log.tidy()
    _tidy(log)
    assert [number for number in range(8) if a_key(number) in log.index] == [0]  # 1 was used last, so it moved first
    assert counters.write_errors == 1
    log.check()


def test_files_that_cannot_be_deleted_do_not_keep_the_tier_from_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = _opened(tmp_path, num_segments=8)
    _append(log, range(48))
    log.close()
    tried: list[int] = []

    def denied(segment: Segment) -> None:
        assert segment.number not in tried, "tried again without end"
        tried.append(segment.number)
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Segment, "delete", denied)
    smaller, _ = _opened(tmp_path)
    assert tried == [0, 1, 2, 3, 4, 5]
    with pytest.raises(OSError, match="budget"):  # writing waits until files can be deleted
        _append(smaller, [99])


def test_after_a_start_on_a_disk_that_became_read_only_blocks_are_read_and_written_once_it_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = _opened(tmp_path)
    _append(log, range(4))
    log.close()
    with monkeypatch.context() as read_only:
        make_read_only(read_only)
        log, _ = _opened(tmp_path)
        assert _found(log, range(4)) == list(range(4))
        with pytest.raises(OSError, match="Read-only"):
            _append(log, [4])
    _append(log, [4])
    assert _found(log, range(5)) == list(range(5))
    log.check()


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    first, _ = _opened(tmp_path)
    with pytest.raises(Unavailable, match="another KV service"):
        _opened(tmp_path)
    first.close()
    _opened(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="/proc/kv"):
        _opened(Path("/proc/kv"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="file"):
        _opened(tmp_path / "file")
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(InvalidRequest, match="elsewhere"):
        _opened(tmp_path / "elsewhere")


def test_folder_and_files_are_for_their_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kv-disk" / "tier"
    folder.mkdir(parents=True, mode=0o755)
    log, _ = _opened(folder)
    _append(log, [0])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_budget_of_less_than_four_segments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="raise the budget"):
        _opened(tmp_path, num_segments=3)


def _opened(folder: Path, num_segments: int = 4) -> tuple[SegmentLog, DiskCounters]:
    counters = DiskCounters()
    log = SegmentLog(folder, num_segments * _SEGMENT_BYTES, _SEGMENT_BYTES, counters)
    log.open()
    return log, counters


def _reopened(log: SegmentLog, folder: Path, num_segments: int = 4) -> tuple[SegmentLog, DiskCounters]:
    log.close()
    return _opened(folder, num_segments)


def _append(log: SegmentLog, numbers: Iterable[int]) -> None:
    for number in numbers:
        payload = a_payload(number)
        log.append(a_key(number), memoryview(payload), block_checksum(payload))


def _found(log: SegmentLog, numbers: Iterable[int]) -> list[int]:
    blocks = {number: log.read(a_key(number), None) for number in numbers}
    assert all(block is None or block.payload == a_payload(number) for number, block in blocks.items())
    return [number for number, block in blocks.items() if block is not None]


def _tidy(log: SegmentLog) -> None:
    while log.tidy():
        pass


def _only_record(log: SegmentLog, folder: Path, payload: bytes) -> tuple[Path, bytes]:
    log.append(a_key(0), memoryview(payload), block_checksum(payload))
    path = folder / "segment-000000000000.tkv"
    return path, path.read_bytes()


def _no_descriptor(*_: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def _no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
