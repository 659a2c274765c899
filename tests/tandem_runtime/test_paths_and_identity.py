"""Folders belong to one user alone, and names are distinct."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from tandem_runtime.errors import InvalidRequest
from tandem_runtime.identity import default_host_id, default_worker_id, new_incarnation
from tandem_runtime.paths import forget_dead_sockets, runtime_dir, socket_path, state_dir

VARIABLES = ("TANDEM_STATE_DIR", "TANDEM_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_state_is_where_it_is_said_to_be_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_dir() == tmp_path / ".local" / "state" / "tandem"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_dir() == tmp_path / "xdg" / "tandem"
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path / "variable"))
    assert state_dir() == tmp_path / "variable"
    assert state_dir(tmp_path / "setting") == tmp_path / "setting"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    no_home(monkeypatch)
    with pytest.raises(InvalidRequest, match=r"user \d+ has no home folder.*set TANDEM_STATE_DIR"):
        state_dir()


def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take HOME and the user's entry in passwd away."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_a_folder_that_cannot_be_closed_to_others_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise OSError("Read-only file system")

    (tmp_path / "open").mkdir(mode=0o755)
    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(InvalidRequest, match="Read-only file system; set TANDEM_STATE_DIR to one"):
        state_dir(tmp_path / "open", "TANDEM_STATE_DIR")


def test_sockets_are_where_they_are_said_to_be_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    assert runtime_dir() == Path(f"/tmp/tandem-{os.getuid()}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_dir() == tmp_path / "tandem"
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", str(tmp_path / "variable"))
    assert runtime_dir() == tmp_path / "variable"


def test_our_folders_are_closed_to_others(tmp_path: Path) -> None:
    assert mode(state_dir(tmp_path / "new")) == 0o700
    assert mode(state_dir(tmp_path / "named", "--state-dir")) == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    assert mode(runtime_dir(tmp_path / "open")) == 0o700


def test_a_folder_may_be_a_link_of_ours(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert state_dir(tmp_path / "link") == tmp_path / "link"


def test_a_file_or_a_dangling_link_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(InvalidRequest, match="TANDEM_STATE_DIR"):
            state_dir(tmp_path / name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    os.chown(foreign, 12345, 12345)
    with pytest.raises(InvalidRequest, match="12345"):
        runtime_dir(foreign)
    with pytest.raises(InvalidRequest, match=r"12345.*--state-dir"):
        state_dir(foreign, "--state-dir")


def test_a_socket_path_that_unix_cannot_hold_is_refused_with_the_remedy(tmp_path: Path) -> None:
    short = Path(f"/tmp/tandem-test-{os.getpid()}")
    try:
        assert socket_path("kv.sock", short) == short / "kv.sock"
    finally:
        short.rmdir()
    with pytest.raises(InvalidRequest, match="TANDEM_RUNTIME_DIR"):
        socket_path("x" * 108, tmp_path)


def test_processes_with_one_host_id_and_one_process_id_have_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers with the host's network: the second one replaced the first one in the registry, for good."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    first, second = (default_worker_id("decode", "host", incarnation) for incarnation in ("0123" * 4, "4567" * 4))
    assert (first, second) == ("decode-host-1-0123", "decode-host-1-4567")


def test_each_life_has_another_incarnation_and_the_host_keeps_its_name() -> None:
    lives = {new_incarnation() for _ in range(100)}
    assert len(lives) == 100
    assert all(len(life) == 16 and int(life, 16) >= 0 for life in lives)
    assert default_host_id() == default_host_id() != ""


def test_sockets_that_nobody_listens_at_are_removed_and_others_stay(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as alive,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead,
    ):
        alive.bind(str(tmp_path / "kv-1.sock"))
        alive.listen()
        dead.bind(str(tmp_path / "kv-2.sock"))
        dead.close()
        forget_dead_sockets("kv-*.sock", tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["kv-1.sock"]
