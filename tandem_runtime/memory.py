"""Reads the GPU and host memory that a worker reports in its heartbeat."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from tandem.v1 import types_pb2 as pb
from tandem_runtime.device_reader import DeviceReader, EngineMemory, Reading
from tandem_runtime.host_memory import host_memory
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_Parts = tuple[pb.HostMemory, Reading, int]
_NO_DEVICES = Reading(reason="this process uses no device")

FRESH_SECONDS = 0.5
"""A reading of this age is followed by the next one."""
SILENT_SECONDS = 3.0
"""From here on a report names the seconds that NVML has not answered."""
_FIRST_SECONDS = 3.0
"""The longest wait of `read` for the devices: a driver that hangs does not keep a worker from starting."""


class MemoryProbe:
    """Reads the devices this process may use, and the host; never raises, and no caller waits for the driver.

    `own_pids` are the worker's processes: `process_bytes` is their memory, and their GPU memory is not foreign.
    """

    def __init__(
        self,
        own_pids: Callable[[], Collection[int]],
        engine_memory: Callable[[], EngineMemory | None] = lambda: EngineMemory("", 0),
        *,
        has_devices: bool = True,
    ) -> None:
        """`engine_memory` is what the worker's engine counts; None: not known yet. Both are called in threads.

        A process without an engine has no devices: what it read of them would say nothing of itself.
        """
        self._own_pids = own_pids
        self._devices = DeviceReader(self._pids, engine_memory) if has_devices else None
        self._host = pb.HostMemory()
        self._composed: tuple[_Parts, pb.MemoryReport] | None = None
        self._is_unreadable = False
        self._read_at: float | None = None
        self._thread: threading.Thread | None = None

    def read(self) -> pb.MemoryReport:
        """Take a reading: some milliseconds, and 0.1 s to start NVML, at most 3 s. An event loop leaves it to a thread.

        What cannot be read for lack of a descriptor stays as it was.
        """
        if self._devices is not None:
            self._devices.request()
        self._read_host()
        if self._devices is not None:
            self._devices.wait(_FIRST_SECONDS)
        return self.latest

    @property
    def latest(self) -> pb.MemoryReport:
        """The latest reading, empty before the first; from any thread. Heartbeats keep it a second old at most."""
        return self._compose() if self._read_at is not None else pb.MemoryReport()

    def report(self) -> pb.MemoryReport:
        """Return the latest reading at once. If it is FRESH_SECONDS old, threads take the next one.

        Without a reading this is empty: a process calls `read` before it serves.
        """
        is_reading = self._thread is not None and self._thread.is_alive()
        if not is_reading and (self._read_at is None or time.monotonic() - self._read_at > FRESH_SECONDS):
            self._thread = threading.Thread(target=self._read_host, name="memory-probe", daemon=True)
            self._thread.start()
            if self._devices is not None:
                self._devices.request()
        return self.latest

    def _read_host(self) -> None:
        try:
            self._host = host_memory(self._pids())
            self._is_unreadable = False
        except OSError as error:
            if not self._is_unreadable:
                log.warning("memory_unreadable", error=str(error))
            self._is_unreadable = True
        self._read_at = time.monotonic()

    def _compose(self) -> pb.MemoryReport:
        """Return a report of the latest readings; the same object as long as they are."""
        reading = self._devices.latest if self._devices is not None else _NO_DEVICES
        seconds = self._devices.seconds_unanswered if self._devices is not None else 0.0
        parts = self._host, reading, int(seconds) if seconds >= SILENT_SECONDS else 0
        composed = self._composed
        if composed is None or any(before is not now for before, now in zip(composed[0], parts, strict=True)):
            composed = self._composed = parts, _report(*parts)
        return composed[1]

    def _pids(self) -> set[int]:
        try:
            return set(self._own_pids())
        except Exception:
            log.exception("pid_lookup_failed")
            return set()


def _report(host: pb.HostMemory, reading: Reading, seconds: int) -> pb.MemoryReport:
    """Return a report; `seconds` says how long NVML has not answered, 0 if it does."""
    silence = f"NVML has not answered for {seconds} s" if seconds else ""
    if not reading.devices:
        return pb.MemoryReport(host=host, source=f"host: {silence or reading.reason}", device_age_seconds=seconds)
    report = pb.MemoryReport(devices=reading.devices, host=host, source="nvml", device_age_seconds=seconds)
    for device in report.devices if silence else ():
        device.error = f"{silence}; {device.error}" if device.error else silence
    return report
