"""Reads total and available host memory: the cgroup's limit (v2 or v1) if there is one, else the machine's."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tandem.v1 import types_pb2 as pb

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class _Version:
    limit: str
    usage: str
    inactive_file: str


_V2 = _Version("memory.max", "memory.current", "inactive_file")
_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def host_memory(own_pids: Collection[int]) -> pb.HostMemory:
    """Read host memory; `process_bytes` is the resident memory of `own_pids`."""
    machine = psutil.virtual_memory()
    total_bytes, available_bytes = machine.total, machine.available
    for limit_bytes, used_bytes in _limits():
        total_bytes = min(total_bytes, limit_bytes)
        available_bytes = min(available_bytes, max(0, limit_bytes - used_bytes))
    return pb.HostMemory(
        total_bytes=total_bytes, available_bytes=available_bytes, process_bytes=_resident_bytes(own_pids)
    )


def _limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, used bytes without droppable file cache) of each enclosing cgroup that has a limit."""
    for folder, version in _folders():
        limit_bytes = _read_number(folder / version.limit)
        used_bytes = _read_number(folder / version.usage)
        if limit_bytes is not None and used_bytes is not None:
            yield limit_bytes, max(0, used_bytes - _inactive_file_bytes(folder, version))


def _folders() -> Iterator[tuple[Path, _Version]]:
    """Yield the folders of this process's memory cgroup, innermost first. Skips those that a container does not see."""
    for line in _lines(MEMBERSHIP):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _upwards(CGROUP_ROOT, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _upwards(CGROUP_ROOT / "memory", path, _V1)


def _upwards(root: Path, path: str, version: _Version) -> Iterator[tuple[Path, _Version]]:
    folder = root / path.lstrip("/")
    while folder != root:
        yield folder, version
        folder = folder.parent
    yield root, version


def _read_number(path: Path) -> int | None:
    """Return the number in a cgroup file; None where there is no file or no limit ("max")."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _inactive_file_bytes(folder: Path, version: _Version) -> int:
    fields = (line.split() for line in _lines(folder / "memory.stat"))
    return next((int(field[1]) for field in fields if field[0] == version.inactive_file), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _resident_bytes(pids: Collection[int]) -> int:
    return sum(_resident_bytes_of(pid) for pid in pids)


def _resident_bytes_of(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0  # the process has ended since it was listed
