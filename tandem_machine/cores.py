"""Counts the cores that this process may use: its affinity, limited by the CPU quota of its cgroups."""

from __future__ import annotations

import os

from tandem_machine.cgroups import cgroups


def allowed_cores() -> tuple[int, ...]:
    """Return the cores that the scheduler may run this process on, in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))  # macOS: the numbers only count


def cpu_quota() -> float | None:
    """Return the processor seconds per second that the tightest quota allows (cgroup v1 or v2); None without one."""
    quotas = []
    for group in cgroups("cpu"):
        if group.version == 2:
            quota, _, period = group.text("cpu.max").partition(" ")
        else:
            quota, period = group.text("cpu.cfs_quota_us"), group.text("cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def num_usable_cores() -> int:
    """Return how many threads may compute at once: the allowed cores, or the whole cores of a smaller quota.

    A thread beyond the quota only makes the kernel stop all threads earlier in each period.
    """
    quota = cpu_quota()
    num_cores = len(allowed_cores())
    return num_cores if quota is None else max(1, min(num_cores, int(quota)))
