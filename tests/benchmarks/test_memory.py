"""Linux's memory figures of a process are read correctly, and compared with the limits."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.memory.__main__ import Variant, Worker, sheets, targets
from benchmarks.memory.readings import MB, Reading, read, weights_of

_SMAPS = """\
7f0000000000-7f0000010000 rw-p 00000000 00:00 0
Rss:                 100 kB
Pss:                 100 kB
7f0000010000-7f0000020000 rw-p 00000000 fd:00 77                         /state/packed/ab cd.safetensors
Size:               4096 kB
Rss:                4000 kB
Pss:                2000 kB
VmFlags: rd wr mr
7f0000020000-7f0000030000 rw-p 00000000 fd:00 78                         /state/packed/ef.safetensors
Rss:                  10 kB
Pss:                   5 kB
7f0000030000-7f0000040000 r--p 00000000 fd:00 79                         /state/packed-not/gh.safetensors
Rss:                  70 kB
Pss:                  70 kB
"""


def _worker(rest_mb: int, weights_pss_mb: int) -> Worker:
    weights, pool = 1000 * MB, 256 * MB
    reading = Reading(weights + pool + rest_mb * MB, 0, 0, weights, weights_pss_mb * MB, 0)
    return Worker("S.lean_bf16, cold", weights, pool, reading, reading, reading)


def test_only_files_of_packed_weights_are_weights() -> None:
    found = weights_of(_SMAPS.splitlines(), "/state/packed")
    assert (found["Rss"], found["Pss"]) == (4010 * 1024, 2005 * 1024)
    assert weights_of(_SMAPS.splitlines(), "/other") == {}


def test_a_process_reads_its_own_memory(tmp_path: Path) -> None:
    size = 8 * MB
    path = tmp_path / "weights"
    path.write_bytes(b"x" * size)
    before = read(os.getpid(), tmp_path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        assert mapping[:].count(b"x") == size
        during = read(os.getpid(), tmp_path)
    assert before.weights_rss == 0
    assert during.weights_rss >= size and during.weights_pss >= size
    assert during.peak >= during.weights_rss and during.rss >= during.pss > during.anonymous // 2 > 0


@pytest.mark.parametrize(("rest_mb", "pss_mb", "met"), [(400, 500, True), (401, 500, False), (400, 520, False)])
def test_targets_are_met_at_their_limits_and_missed_beyond(rest_mb: int, pss_mb: int, met: bool) -> None:
    workers = [_worker(rest_mb, pss_mb)] * 2
    assert all(each.is_met for each in targets(Variant("S", "lean", "bf16"), workers)) == met


def test_rest_after_loading_counts_as_much_as_rest_after_work() -> None:
    worker = _worker(100, 500)
    grown = replace(worker, loaded=replace(worker.loaded, rss=worker.loaded.rss + 500 * MB))
    assert not targets(Variant("S", "lean", "bf16"), [grown, worker])[0].is_met


def test_private_weights_are_held_twice_and_are_not_asked_to_be_shared() -> None:
    workers = [_worker(10, 0)] * 2
    assert len(targets(Variant("S", "transformers", "bf16"), workers)) == 2
    assert sheets({"S.compat_bf16": workers})[1].rows[0][-1] == "2 times"
