"""Reads the limit of processes and threads, and says which error comes from it."""

from __future__ import annotations

import os
import resource

from tandem_machine.cgroups import cgroups

PROCESSES_PER_SERVICE = 20
"""Processes and threads of one service with its engine, on two cores. Four services had 84 under load; more cores mean
more."""

_CAUSES = ("can't start new thread", "Resource temporarily unavailable")
"""What Python says, and what C++ and fork say (EAGAIN)."""

_REMEDY = "raise it (pids.max of the container, TasksMax of systemd, ulimit -u)"


def max_processes() -> int | None:
    """Return the tightest limit of processes and threads: of the cgroups or of the user; None without a limit.

    The user's limit (RLIMIT_NPROC) counts all of the user's processes on the machine. Root has none.
    """
    limits = [limit for group in cgroups("pids") if (limit := group.number("pids.max")) is not None]
    of_user, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if of_user != resource.RLIM_INFINITY and os.geteuid() != 0:
        limits.append(of_user)
    return min(limits, default=None)


def too_few_processes(num_services: int) -> str:
    """Return why this process may not start so many services, "" if it may.

    Beyond the limit gRPC waits for threads that never start, so a service would hang instead of ending with an error.
    """
    limit, needed = max_processes(), num_services * PROCESSES_PER_SERVICE
    if limit is None or limit >= needed:
        return ""
    return f"the limit of processes and threads is {limit}, {needed} are needed at least; {_REMEDY}"


def with_remedy(text: str) -> str:
    """Return the text of an error; if it is for lack of threads or processes, with what to set."""
    if not any(cause in text for cause in _CAUSES):
        return text
    return (
        f"{text}; the limit of processes and threads is reached: {_REMEDY}, or give the engine fewer threads with "
        "--num-threads"
    )
