"""Reports host memory: what this process may use of it, and what the worker's processes take."""

from __future__ import annotations

from collections.abc import Collection

import psutil

from tandem.v1 import types_pb2 as pb
from tandem_machine.memory import usable_memory


def host_memory(own_pids: Collection[int]) -> pb.HostMemory:
    """Read host memory, limited by this process's cgroups; `process_bytes` is the resident memory of `own_pids`."""
    memory = usable_memory()
    return pb.HostMemory(
        total_bytes=memory.total_bytes,
        available_bytes=memory.available_bytes,
        process_bytes=sum(map(_resident_bytes, own_pids)),
    )


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0  # the process has ended since it was listed
