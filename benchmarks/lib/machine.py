"""Describes the machine, and measures the CPU use of other programs."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("torch", "transformers", "grpcio", "starlette", "uvicorn", "httpx")


def machine_conditions() -> dict[str, Any]:
    """Describe the machine, its software and the command line."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "client": "on the same cores as the services",
        "requests": "greedy; random words, so no prefix is shared; spans exported over OTLP all the while",
        "command": " ".join(["python -m benchmarks.first_light", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds so far: of the whole machine, and of this process with all it has started."""

    wall: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> CpuUse:
        times = psutil.cpu_times()
        # Linux counts a guest's time as user time too; time stolen by the host was kept from us by others.
        busy = times.user + times.nice + times.system
        busy += sum(getattr(times, name, 0.0) for name in ("irq", "softirq", "steal"))
        return cls(time.monotonic(), busy, _own_cpu_seconds())

    def foreign_share_since(self, earlier: CpuUse) -> float:
        """Return what others used since then, as a share of all cores; 0.0 to 1.0."""
        wall = (self.wall - earlier.wall) * (psutil.cpu_count() or 1)
        foreign = (self.busy - earlier.busy) - (self.own - earlier.own)
        return min(1.0, max(0.0, foreign / wall))


def _own_cpu_seconds() -> float:
    total = 0.0
    process = psutil.Process()
    for each in [process, *process.children(recursive=True)]:
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
