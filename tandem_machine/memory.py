"""Reads the memory that this process may use: the machine's, limited by its cgroups (v1 and v2)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem_machine.cgroups import Cgroup, cgroups, entry_of, read

_MEMINFO = Path("/proc/meminfo")
_VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True)
class Memory:
    """Bytes; file pages that the kernel can drop count as available."""

    total_bytes: int
    available_bytes: int


def usable_memory() -> Memory:
    """Return the machine's memory, or the tightest limit and the least rest of this process's cgroups."""
    total_bytes, available_bytes = _machine()
    for limit_bytes, used_bytes in _limits():
        total_bytes = min(total_bytes, limit_bytes)
        available_bytes = min(available_bytes, limit_bytes - used_bytes)
    return Memory(total_bytes, max(0, available_bytes))


def num_oom_kills() -> int | None:
    """Return how many processes the kernel has killed for lack of memory: in this cgroup, else on this machine.

    None if the kernel does not tell. A count that has grown since a process started says why the process is gone.
    """
    for group in cgroups("memory"):
        file = "memory.events" if group.version == 2 else "memory.oom_control"
        if (count := group.entry(file, "oom_kill")) is not None:
            return count
    return entry_of(read(_VMSTAT), "oom_kill")


def _machine() -> tuple[int, int]:
    """Return (total, available) bytes of the machine."""
    text = read(_MEMINFO)
    total, available = entry_of(text, "MemTotal"), entry_of(text, "MemAvailable")
    if total is not None and available is not None:
        return total * 1024, available * 1024
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total_bytes, total_bytes // 2  # no Linux: half is a guess


def _limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, use without droppable file pages) in bytes of each enclosing cgroup that has a limit."""
    for group in cgroups("memory"):
        limit_bytes, used_bytes, file_bytes = _reading(group)
        if limit_bytes is not None and used_bytes is not None:
            yield limit_bytes, max(0, used_bytes - (file_bytes or 0))


def _reading(group: Cgroup) -> tuple[int | None, int | None, int | None]:
    if group.version == 2:
        return group.number("memory.max"), group.number("memory.current"), group.entry("memory.stat", "inactive_file")
    return (
        group.number("memory.limit_in_bytes"),
        group.number("memory.usage_in_bytes"),
        group.entry("memory.stat", "total_inactive_file"),
    )
