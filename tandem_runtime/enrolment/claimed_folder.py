"""Gives each process of a machine a folder of its own for its certificate, and the same one again after a restart.

The first process of a name gets `<parent>/<name>`, a second one beside it `<parent>/<name>.2`. The kernel releases a
folder when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from pathlib import Path

from tandem_machine.lock_file import open_lock
from tandem_runtime.errors import InvalidRequest

MAX_FOLDERS = 1024
_LOCK = "lock"
_MAX_NAME_CHARACTERS = 64


class ClaimedFolder:
    """A folder that no other process claims until `release`, or until this process has ended."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def claim(cls, parent: Path, name: str) -> ClaimedFolder:
        """Claim the first free folder of `name`. Reads and writes files: not for an event loop.

        Raise InvalidRequest if all are taken, or if they cannot be made.
        """
        name = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".")[:_MAX_NAME_CHARACTERS] or "process"
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if stat.S_IMODE(parent.stat().st_mode) != 0o700:
                parent.chmod(0o700)
            for number in range(1, MAX_FOLDERS + 1):
                path = parent / (name if number == 1 else f"{name}.{number}")
                if (descriptor := _lock(path)) is not None:
                    return cls(path, descriptor)
        except OSError as error:
            raise InvalidRequest(
                f"cannot use the folder {parent} for certificates: {error}; set TANDEM_STATE_DIR (--state-dir) to a "
                "folder that can be written"
            ) from error
        raise InvalidRequest(
            f"{MAX_FOLDERS:,} processes named {name} run with certificates in {parent}, which is the limit; give some "
            "of them another --worker-id"
        )

    def release(self) -> None:
        """Let another process claim the folder. May be called more than once."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lock(path: Path) -> int | None:
    """Return the descriptor of a lock on `path`, which is made if missing; None if another process has it."""
    path.mkdir(mode=0o700, exist_ok=True)
    descriptor = open_lock(path / _LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
