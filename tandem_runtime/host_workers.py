"""Tells the workers of one host what each other's engines hold on the devices they share.

Each process has a file of its own in the runtime folder, which it keeps locked while it lives. The kernel gives the
lock up when the process ends, however it ends, and whoever finds an unlocked file removes it. Pids would not do: the
workers may be in different containers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tandem_runtime import paths
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_FOLDER = "device-memory"
_FILE_BYTES = 4096
"""Of each file: one write replaces all of it."""


@dataclass(frozen=True)
class WorkerNote:
    """What one worker tells the others of its host."""

    pid_namespace: int
    """The inode of its pid namespace: only equal ones have comparable pids. 0: not known."""
    pids: tuple[int, ...]
    is_loading: bool
    """Its engine may hold memory on any device, and has not counted it."""
    bytes_of: Mapping[str, int] = field(default_factory=dict)
    """By NVML's UUID of a device or MIG instance, what its engine counts there."""


class HostWorkers:
    """This process's note, and those of the others. For one thread; the note ends with the process."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` replaces the runtime folder's. Nothing is written before the first `publish`."""
        self._folder = folder
        self._name = f"{secrets.token_hex(8)}.json"
        self._fd: int | None = None
        self._written = b""
        self._is_broken = False

    def publish(self, note: WorkerNote) -> None:
        """Make `note` what the others read. A folder that cannot be written is logged once."""
        text = json.dumps([note.pid_namespace, note.pids, note.is_loading, dict(note.bytes_of)]).encode()
        if text == self._written or len(text) > _FILE_BYTES:
            return
        try:
            if self._fd is None:
                self._fd = self._open()
            os.pwrite(self._fd, text.ljust(_FILE_BYTES), 0)
            self._written = text
        except (OSError, InvalidRequest) as error:
            self._complain(error)

    def others(self) -> list[WorkerNote]:
        """Return the notes of the other processes that live; forget those of ended ones."""
        try:
            found = [self._read(path) for path in self._path().glob("*.json") if path.name != self._name]
        except (OSError, InvalidRequest) as error:
            self._complain(error)
            return []
        return [note for note in found if note is not None]

    def _path(self) -> Path:
        folder = self._folder or paths.runtime_dir() / _FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _open(self) -> int:
        """Return this process's file. It gets its name once it is locked: until then nobody looks at it."""
        new = self._path() / f"{self._name}.new"
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self._path() / self._name)
        except BaseException:
            os.close(fd)
            new.unlink(missing_ok=True)
            raise
        return fd

    def _read(self, path: Path) -> WorkerNote | None:
        with _opened(path) as fd:
            if fd is None:
                return None
            with contextlib.suppress(BlockingIOError):  # its owner lives
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                return None
            try:
                pid_namespace, pids, is_loading, bytes_of = json.loads(os.pread(fd, _FILE_BYTES, 0))
                return WorkerNote(int(pid_namespace), tuple(pids), bool(is_loading), dict(bytes_of))
            except (ValueError, TypeError):  # it has locked its file, and not written it yet
                return None

    def _complain(self, error: Exception) -> None:
        if not self._is_broken:
            log.warning("device_notes_unusable", error=str(error))
        self._is_broken = True


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # its owner has just ended
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def pid_namespace() -> int:
    """Return the inode of this process's pid namespace; 0 where the kernel does not tell."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


HOST_PID_NAMESPACE = 0xEFFF_FFFC
"""PROC_PID_INIT_INO of the kernel: the namespace of the host."""
