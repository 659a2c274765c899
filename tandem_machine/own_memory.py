"""Reads how much private memory this process has."""

from __future__ import annotations

import os
import resource


class OwnMemory:
    """Reads the size of this process's private memory from a file that stays open. Not for use across a fork."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # not Linux
            self._file = -1

    def data_bytes(self) -> int:
        """Return the bytes; 0 where they are not known."""
        if self._file < 0:
            return 0
        return int(os.pread(self._file, 256, 0).split()[5]) * resource.getpagesize()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def data_bytes() -> int:
    """Return the size of this process's private memory; 0 where it is not known."""
    memory = OwnMemory()
    try:
        return memory.data_bytes()
    finally:
        memory.close()
