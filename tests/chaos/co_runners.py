"""Measures how much of the machine other programs take.

Pauses are attributed to the fleet only while other programs leave it the cores.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise

import psutil

_EVERY_SECONDS = 1.0
MAX_CORES = 0.5


@dataclass(frozen=True)
class _Sample:
    at: float
    """time.monotonic()."""
    busy_seconds: float
    """Busy seconds of all cores since boot."""
    by_process: dict[int, float]
    """CPU seconds of the run's own processes."""


class CoRunners:
    """Samples once a second how many cores are busy, and how many of those with the run's processes."""

    def __init__(self) -> None:
        self._samples: list[_Sample] = []

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            self._samples.append(await asyncio.to_thread(_sample))
            await asyncio.sleep(_EVERY_SECONDS)

    def mean_cores(self, since: float = 0.0, until: float = float("inf")) -> float:
        """Return the mean cores of other programs between two times, including one sample before and after."""
        spans = [
            (one, other)
            for one, other in pairwise(self._samples)
            if other.at >= since - _EVERY_SECONDS and one.at <= until + _EVERY_SECONDS
        ]
        if not spans:
            return 0.0
        foreign = sum(other.busy_seconds - one.busy_seconds - _ours(one, other) for one, other in spans)
        return max(0.0, foreign / (spans[-1][1].at - spans[0][0].at))


def _ours(one: _Sample, other: _Sample) -> float:
    return sum(seconds - one.by_process.get(pid, 0.0) for pid, seconds in other.by_process.items())


def _sample() -> _Sample:
    times = psutil.cpu_times()
    by_process = {}
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue  # the last second of a process counts as other programs'
        by_process[process.pid] = used.user + used.system
    return _Sample(time.monotonic(), sum(times) - times.idle - times.iowait, by_process)
