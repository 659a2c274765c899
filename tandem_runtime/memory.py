"""Reads the GPU and host memory that a worker reports in its heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from tandem.v1 import types_pb2 as pb
from tandem_runtime.host_memory import host_memory
from tandem_runtime.log import get_logger
from tandem_runtime.nvml import Nvml, NvmlUnavailable

log = get_logger(__name__)

FRESH_SECONDS = 0.5
"""Heartbeats to several control-plane replicas share one reading."""


class MemoryProbe:
    """Reads the devices this process may use, and the host; never raises.

    `own_pids` are the worker's processes: `process_bytes` is their memory, and their GPU memory is not foreign.
    """

    def __init__(self, own_pids: Callable[[], Collection[int]]) -> None:
        self._own_pids = own_pids
        self._nvml = Nvml()
        self._report = pb.MemoryReport()
        self._read_at = float("-inf")

    def report(self) -> pb.MemoryReport:
        """Return a reading at most FRESH_SECONDS old. A new one takes some milliseconds."""
        if time.monotonic() - self._read_at > FRESH_SECONDS:
            self._report = self._read()
            self._read_at = time.monotonic()
        return self._report

    def _read(self) -> pb.MemoryReport:
        own_pids = self._pids()
        host = host_memory(own_pids)
        try:
            devices = self._nvml.devices(own_pids)
        except NvmlUnavailable as reason:
            return pb.MemoryReport(host=host, source=f"host: {reason}")
        if not devices:
            return pb.MemoryReport(host=host, source="host: NVML shows no device to this process")
        return pb.MemoryReport(devices=devices, host=host, source="nvml")

    def _pids(self) -> set[int]:
        try:
            return set(self._own_pids())
        except Exception:
            log.exception("pid_lookup_failed")
            return set()
