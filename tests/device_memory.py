"""Finds who holds memory of the stand-in for NVIDIA's driver: by descriptors and by mappings, from outside."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_NAME = "/memfd:cuda-stub"


def device_memory_of(pid: int) -> set[int]:
    """Return the inodes of all device memory that a process maps or has a descriptor of; none of a dead process."""
    found = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            parts = line.split(maxsplit=5)
            if len(parts) == 6 and parts[5].startswith(_NAME):
                found.add(int(parts[4]))
        for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
            found |= _inode_behind(entry)
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return set()
    return found


def descendants(pid: int) -> list[int]:
    """Return a process and the processes that it started, and theirs."""
    found = [pid]
    try:
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            for child in (task / "children").read_text().split():
                found += descendants(int(child))
    except (FileNotFoundError, ProcessLookupError):
        return found
    return found


def device_memory_of_all(pids: Iterable[int]) -> set[int]:
    """Return the inodes of the device memory of these processes and of those that they started."""
    return {inode for pid in pids for each in descendants(pid) for inode in device_memory_of(each)}


def _inode_behind(entry: Path) -> set[int]:
    try:
        return {entry.stat().st_ino} if str(entry.readlink()).startswith(_NAME) else set()
    except FileNotFoundError:  # the descriptor was closed meanwhile
        return set()
