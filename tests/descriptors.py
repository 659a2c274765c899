"""Finds descriptors that were not closed, whatever else the process closes meanwhile."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path


class OpenFiles:
    """The files that this process has open when this is made."""

    def __init__(self) -> None:
        self._before = _files()

    def num_more(self) -> int:
        """Return how many descriptors are open now that were not: what others have closed does not count."""
        return (_files() - self._before).total()


def _files() -> Counter[tuple[int, int]]:
    """Return the number of descriptors of each file, by device and inode."""
    files: Counter[tuple[int, int]] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since: that of the listing is
            status = os.fstat(int(entry.name))
            files[status.st_dev, status.st_ino] += 1
    return files
