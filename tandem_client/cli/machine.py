"""What does this machine have to divide: cores, memory and GPUs that this process may use?"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """Usable cores by number, memory that is still free, and GPUs as CUDA_VISIBLE_DEVICES names them."""

    cores: tuple[int, ...]
    free_memory_bytes: int
    gpus: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.cores, "a machine that runs this has a core"


def this_machine() -> Machine:
    return Machine(usable_cores(), free_memory_bytes(), usable_gpus())


def usable_cores() -> tuple[int, ...]:
    """Return the cores we may run on, no more of them than a container's CPU quota pays for."""
    # macOS has no affinity to divide: there the numbers only count threads
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quota = _cpu_quota()
    return tuple(cores if quota is None else cores[: max(1, int(quota))])


def free_memory_bytes() -> int:
    """Return what the machine can still give, or what our cgroup may still take, whichever is less."""
    in_cgroup = [limit - used for limit, used in _cgroup_memory() if limit < 1 << 60]
    return max(0, min([_available_bytes(), *in_cgroup]))


def usable_gpus() -> tuple[str, ...]:
    """Return the NVIDIA GPUs we may use: those CUDA_VISIBLE_DEVICES leaves, else all the driver knows."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    folder = Path("/proc/driver/nvidia/gpus")
    return tuple(str(index) for index in range(len(list(folder.iterdir())) if folder.is_dir() else 0))


def _available_bytes() -> int:
    meminfo = _read(Path("/proc/meminfo"))
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    if match:
        return int(match[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_memory() -> list[tuple[int, int]]:
    """Return (limit, used without page cache) in bytes of our cgroup and of each one it lies in."""
    pairs = []
    for folder in _cgroup_folders("memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.strip().isdigit() and used.strip().isdigit():
            cache = re.search(r"^(?:total_)?inactive_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
            pairs.append((int(limit), int(used) - (int(cache[1]) if cache else 0)))
    return pairs


def _cpu_quota() -> float | None:
    """Return how many cores the tightest CPU quota allows, None where there is none."""
    quotas = []
    for folder in _cgroup_folders("cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup_folders(controller: str) -> list[Path]:
    """Return our cgroup's folder and its parents, version 1 or 2; inside a container the root is ours."""
    folders = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / controller if controllers else _CGROUP_ROOT
        parts = [part for part in path.split("/") if part not in ("", "..")]
        folders += [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return folders


def _read(path: Path) -> str:
    """Return a file's text, "" where this kernel has no such file."""
    return path.read_text() if path.is_file() else ""
