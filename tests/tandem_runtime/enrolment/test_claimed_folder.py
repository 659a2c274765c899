"""Two processes never share a folder of certificates; one that starts again gets the folder it had."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_runtime.enrolment import claimed_folder
from tandem_runtime.enrolment.claimed_folder import ClaimedFolder
from tandem_runtime.errors import InvalidRequest
from tests.tandem_machine.test_lock_file import make_read_only

_HOLD = """
import sys
from pathlib import Path
from tandem_runtime.enrolment.claimed_folder import ClaimedFolder
print(ClaimedFolder.claim(Path(sys.argv[1]), "decode").path.name, flush=True)
sys.stdin.read()
"""


def test_each_process_has_its_own_folder_and_gets_it_again(tmp_path: Path) -> None:
    parent = tmp_path / "certificates"
    first, second = ClaimedFolder.claim(parent, "decode"), ClaimedFolder.claim(parent, "decode")
    assert (first.path, second.path) == (parent / "decode", parent / "decode.2")
    assert ClaimedFolder.claim(parent, "kv").path == parent / "kv"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (parent, first.path, second.path)}
    assert modes == {0o700}
    first.release()
    first.release()
    assert ClaimedFolder.claim(parent, "decode").path == first.path


def test_a_process_starts_again_on_a_disk_that_became_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "certificates"
    ClaimedFolder.claim(parent, "decode").release()
    make_read_only(monkeypatch)
    assert ClaimedFolder.claim(parent, "decode").path == parent / "decode"
    with pytest.raises(InvalidRequest, match="cannot use the folder"):
        ClaimedFolder.claim(parent, "decode")  # it is taken, and no second one can be made


def test_a_killed_process_leaves_its_folder_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "decode\n"
        assert ClaimedFolder.claim(tmp_path, "decode").path.name == "decode.2"
        process.kill()
        process.wait(30)
    assert ClaimedFolder.claim(tmp_path, "decode").path.name == "decode"


@pytest.mark.parametrize(
    ("name", "folder"), [("../../etc", "_.._etc"), ("a/b c", "a_b_c"), ("..", "process"), ("x" * 99, "x" * 64)]
)
def test_a_name_is_no_path(name: str, folder: str, tmp_path: Path) -> None:
    assert ClaimedFolder.claim(tmp_path, name).path == tmp_path / folder


def test_the_number_of_folders_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claimed_folder, "MAX_FOLDERS", 2)
    held = [ClaimedFolder.claim(tmp_path, "decode") for _ in range(2)]
    with pytest.raises(InvalidRequest, match=r"2 processes named decode run.*--worker-id"):
        ClaimedFolder.claim(tmp_path, "decode")
    assert len(held) == 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"cannot use the folder .*file.*; set TANDEM_STATE_DIR"):
        ClaimedFolder.claim(tmp_path / "file", "decode")
