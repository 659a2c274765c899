"""Reads the GPU and host memory that a worker reports in its heartbeat."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from tandem.v1 import types_pb2 as pb
from tandem_runtime.host_memory import host_memory
from tandem_runtime.log import get_logger
from tandem_runtime.nvml import Nvml, NvmlUnavailable

log = get_logger(__name__)

FRESH_SECONDS = 0.5
"""A reading of this age is followed by the next one."""


class MemoryProbe:
    """Reads the devices this process may use, and the host; never raises.

    `own_pids` are the worker's processes: `process_bytes` is their memory, and their GPU memory is not foreign.
    """

    def __init__(self, own_pids: Callable[[], Collection[int]]) -> None:
        self._own_pids = own_pids
        self._nvml = Nvml()
        self._report = pb.MemoryReport()
        self._is_unreadable = False
        self._read_at: float | None = None
        self._thread: threading.Thread | None = None

    def read(self) -> pb.MemoryReport:
        """Take a reading: some milliseconds, and 0.1 s to start NVML. An event loop leaves it to a thread.

        What cannot be read for lack of a descriptor stays as it was.
        """
        try:
            self._report = self._take()
            self._is_unreadable = False
        except OSError as error:
            if not self._is_unreadable:
                log.warning("memory_unreadable", error=str(error))
            self._is_unreadable = True
        self._read_at = time.monotonic()
        return self._report

    @property
    def latest(self) -> pb.MemoryReport:
        """The latest reading, empty before the first; from any thread. Heartbeats keep it a second old at most."""
        return self._report

    def report(self) -> pb.MemoryReport:
        """Return the latest reading at once. If it is FRESH_SECONDS old, a thread takes the next one.

        Without a reading this takes the first one: a process calls `read` before it serves.
        """
        if self._read_at is None:
            return self.read()
        is_reading = self._thread is not None and self._thread.is_alive()
        if not is_reading and time.monotonic() - self._read_at > FRESH_SECONDS:
            self._thread = threading.Thread(target=self.read, name="memory-probe", daemon=True)
            self._thread.start()
        return self._report

    def _take(self) -> pb.MemoryReport:
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
