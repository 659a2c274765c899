"""A disk of a few megabytes that fills up and becomes read-only, without harm to the machine that runs the test."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_CHUNK = bytes(1 << 20)
_PAGE_BYTES = 4096


class SmallDisk:
    """A tmpfs at `folder`. It is seen in this mount namespace only: see `tests.chaos.surroundings`."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """Raise OSError where this process may not mount."""
        self.folder = folder
        self._filler = folder / "filler"
        self._read_only = folder.with_name(f"{folder.name}-read-only")
        """The same files, where nobody opens one: a mount in use cannot become read-only."""
        folder.mkdir()
        self._read_only.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=0700", "tmpfs", str(folder))
        try:
            _run("mount", "--bind", str(folder), str(self._read_only))
            _run("mount", "-o", "remount,bind,ro", str(self._read_only))
        except OSError:
            self.unmount()
            raise

    def unmount(self) -> None:
        for folder in (self._read_only, self.folder):
            if folder.is_mount():
                _run("umount", "--lazy", str(folder))

    @contextmanager
    def filled(self) -> Iterator[Callable[[], None]]:
        """Yield a function that takes all that is left, again and again. At the end all is free again."""
        file = os.open(self._filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            yield lambda: _fill(file)
        finally:
            os.close(file)
            self._filler.unlink()

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Put a read-only mount of the same files over the folder: nothing can be made, replaced or opened to write.

        The disk itself cannot be mounted anew while files are open to be written. Those go on: `filled` fails them.
        """
        _run("mount", "--bind", str(self._read_only), str(self.folder))  # a mount is bound with its flags
        try:
            yield
        finally:
            _run("umount", "--lazy", str(self.folder))


def _fill(file: int) -> None:
    for chunk in (_CHUNK, _CHUNK[:_PAGE_BYTES], _CHUNK[:1]):
        try:
            while True:
                os.write(file, chunk)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
