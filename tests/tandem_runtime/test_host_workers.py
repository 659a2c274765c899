"""Workers of a host read each other's device memory, and forget a worker with its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tandem_runtime import paths
from tandem_runtime.host_workers import HostWorkers, WorkerNote

NOTE = WorkerNote(7, (1, 2), False, {"GPU-a": 5})
OTHER = WorkerNote(8, (3,), True)

PEER = """
import sys
from pathlib import Path
from tandem_runtime.host_workers import HostWorkers, WorkerNote
keep = HostWorkers(Path(sys.argv[1]))
keep.publish(WorkerNote(7, (98,), False, {"GPU-a": 7}))
print("published", flush=True)
sys.stdin.read()
"""


def test_each_reads_the_latest_note_of_the_others_and_not_its_own(tmp_path: Path) -> None:
    first, second = HostWorkers(tmp_path), HostWorkers(tmp_path)
    first.publish(NOTE)
    assert (first.others(), second.others()) == ([], [NOTE])
    second.publish(OTHER)
    assert (first.others(), second.others()) == ([OTHER], [NOTE])
    first.publish(OTHER)
    assert second.others() == [OTHER]


def test_a_note_ends_with_its_process_however_it_ends(tmp_path: Path) -> None:
    reader = HostWorkers(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", PEER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as peer:
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"published\n"
        assert reader.others() == [WorkerNote(7, (98,), False, {"GPU-a": 7})]
        peer.kill()
        peer.wait()
    assert reader.others() == []
    assert list(tmp_path.iterdir()) == [], "and its files with it"


def test_a_file_that_says_nothing_yet_is_left_alone(tmp_path: Path) -> None:
    first, second = HostWorkers(tmp_path), HostWorkers(tmp_path)
    first.publish(NOTE)
    [file] = tmp_path.iterdir()
    file.write_bytes(b"")
    assert second.others() == []
    first.publish(OTHER)
    assert second.others() == [OTHER]


def test_a_folder_that_cannot_be_used_costs_the_exchange_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    workers = HostWorkers(file)  # no folder
    workers.publish(NOTE)
    assert workers.others() == []


def test_notes_lie_in_the_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", str(tmp_path))
    HostWorkers().publish(NOTE)
    kept = HostWorkers()
    kept.publish(NOTE)
    assert list((paths.runtime_dir() / "device-memory").glob("*.json"))
    assert (paths.runtime_dir() / "device-memory").stat().st_mode & 0o077 == 0
