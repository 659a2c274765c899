"""Whose is the folder of a disk tier?"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from tandem_runtime.errors import InvalidRequest, Unavailable


class OwnedFolder:
    """A folder of mode 0700 that one process at a time owns: the kernel lets go of the lock however the owner dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def acquire(self) -> None:
        """Make the folder and lock it.

        Raises InvalidRequest if it cannot be made, written or is someone else's, Unavailable if it has an owner.
        """
        assert self._lock is None, f"{self.path} is owned by us already"
        try:
            _make(self.path)
            lock = os.open(self.path / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise InvalidRequest(
                f"cannot keep KV blocks in {self.path}: {error}; name a folder that can be written, "
                "or turn the disk tier off"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise Unavailable(
                f"{self.path} belongs to another KV service that runs; give this one a folder of its own"
            ) from error
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    seen = path.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid():
        raise InvalidRequest(
            f"{path} is not a folder of user {os.getuid()} (owner: {seen.st_uid}), "
            "who could read or replace KV blocks in it; name another one"
        )
    if stat.S_IMODE(seen.st_mode) & 0o077:
        path.chmod(0o700)
