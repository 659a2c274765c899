"""A lock needs no disk that can be written, if its file is there."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from tandem_machine.lock_file import open_lock


def make_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all files behave as on a disk that has become read-only."""
    real_open = os.open

    def only_to_read(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) or (flags & os.O_CREAT and not Path(path).exists()):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real_open(path, flags, *rest, **options)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", only_to_read)
    for name in ("chmod", "rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, refuse)


def test_a_lock_of_an_earlier_start_is_taken_on_a_disk_that_became_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.close(open_lock(tmp_path / "lock"))
    make_read_only(monkeypatch)
    first, second = open_lock(tmp_path / "lock"), open_lock(tmp_path / "lock")
    fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(BlockingIOError):
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(first)
    os.close(second)
    with pytest.raises(FileNotFoundError):
        open_lock(tmp_path / "another")
