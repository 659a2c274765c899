"""Describes the machine, and measures the CPU use of other programs."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
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
    """CPU seconds so far of all processes but this one and those that it has started, by process id."""

    wall: float
    stolen: float
    """By other guests of the host."""
    others: Mapping[int, float]

    @classmethod
    def now(cls) -> CpuUse:
        ours = {os.getpid(), *(each.pid for each in psutil.Process().children(recursive=True))}
        others = {}
        for process in psutil.process_iter():
            if process.pid not in ours:
                with suppress(psutil.NoSuchProcess):
                    others[process.pid] = _cpu_seconds(process)
        return cls(time.monotonic(), getattr(psutil.cpu_times(), "steal", 0.0), others)

    def foreign_share_since(self, earlier: CpuUse) -> float:
        """Return what others used since then, as a share of all cores; 0.0 to 1.0.

        The rest of the machine's use would not do: children whose parent ignores their end are in nobody's account.
        """
        wall = (self.wall - earlier.wall) * (psutil.cpu_count() or 1)
        used = (max(0.0, seconds - earlier.others.get(pid, 0.0)) for pid, seconds in self.others.items())
        return min(1.0, (sum(used) + self.stolen - earlier.stolen) / wall)


def _cpu_seconds(process: psutil.Process) -> float:
    """Return CPU seconds of a process and of its children that have ended; the first process reaps orphans of all."""
    times = process.cpu_times()
    own = times.user + times.system
    return float(own if process.pid == 1 else own + times.children_user + times.children_system)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
