"""Opens a file that a process holds a lock on for as long as it runs."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def open_lock(path: Path) -> int:
    """Return a descriptor of `path` for `fcntl.flock`, which is made if missing. Raise OSError.

    On a disk that has become read-only a file of an earlier start is opened to be read: a lock needs no more, so a
    process starts again there. (Elsewhere it is opened to be written, which locks on NFS need.)
    """
    try:
        return _open(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return _open(path, os.O_RDONLY)


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
