"""Reads devices on a thread of its own, so that a driver that hangs delays nobody.

A request for a reading returns at once. The thread reads, and keeps the latest value. While the driver does not answer
the value stays, its age grows, and no second call is made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tandem.v1 import types_pb2 as pb
from tandem_runtime.device_owners import Holder, owners
from tandem_runtime.host_workers import HOST_PID_NAMESPACE, HostWorkers, WorkerNote, pid_namespace
from tandem_runtime.log import get_logger
from tandem_runtime.nvml import Nvml, NvmlUnavailable

log = get_logger(__name__)

_PREFIX_CHARACTERS = 4
"""Of "GPU-" and "MIG-", which NVML writes before a UUID and CUDA does not."""


@dataclass(frozen=True)
class EngineMemory:
    """The device memory that this worker's engine counts."""

    device_uuid: str
    """As CUDA gives it; "": it uses no device."""
    num_bytes: int


@dataclass(frozen=True)
class Reading:
    """Devices, or the reason why there are none."""

    devices: tuple[pb.Device, ...] = ()
    reason: str = ""


class DeviceReader:
    """The devices of this process. `request`, `wait` and the properties may be used in any thread."""

    def __init__(
        self,
        own_pids: Callable[[], Collection[int]],
        engine_memory: Callable[[], EngineMemory | None],
        workers: HostWorkers | None = None,
        namespace: int | None = None,
    ) -> None:
        """`engine_memory` is None while the engine loads. `namespace` replaces this process's pid namespace."""
        self.latest = Reading(reason="NVML has not been read yet")
        self._own_pids = own_pids
        self._engine_memory = engine_memory
        self._workers = workers or HostWorkers()
        self._namespace = pid_namespace() if namespace is None else namespace
        self._nvml = Nvml()
        self._wanted = threading.Event()
        self._answered = threading.Event()
        self._asked_at: float | None = None
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Ask for a reading; while one is under way this does nothing."""
        if self._asked_at is not None:
            return
        self._answered.clear()
        self._asked_at = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="device-reader", daemon=True)
            self._thread.start()
        self._wanted.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the reading under way; return whether it has come."""
        return self._answered.wait(seconds)

    @property
    def seconds_unanswered(self) -> float:
        """How long NVML has been asked without an answer; 0 if it is not asked now."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            try:
                self.latest = self._take()
            except Exception as error:  # a driver's library of another version, a full table of descriptors
                log.exception("devices_unreadable")
                self.latest = Reading(reason=f"NVML cannot be read: {error}")
            self._asked_at = None
            self._answered.set()

    def _take(self) -> Reading:
        engine = self._engine_memory()
        try:
            found = self._nvml.devices(engine.device_uuid if engine else "")
        except NvmlUnavailable as reason:
            return Reading(reason=str(reason))
        if not found:
            return Reading(reason="NVML shows no device to this process")
        devices = [device for device, _ in found]
        pids = frozenset(self._own_pids())
        counts = _counts(engine, devices)
        self._workers.publish(WorkerNote(self._namespace, tuple(sorted(pids)), engine is None, counts))
        notes = self._workers.others()
        for device, use in found:
            if use is not None:
                own = Holder(pids, None if engine is None else counts.get(device.uuid, 0))
                peers = [self._holder(note, device.uuid) for note in notes]
                known = owners(use, own, peers, sees_host=self._namespace == HOST_PID_NAMESPACE)
                _write(known.own_bytes, known.foreign_bytes, known.reason, device)
        return Reading(tuple(devices))

    def _holder(self, note: WorkerNote, uuid: str) -> Holder:
        is_near = note.pid_namespace == self._namespace != 0
        return Holder(frozenset(note.pids if is_near else ()), None if note.is_loading else note.bytes_of.get(uuid, 0))


def _counts(engine: EngineMemory | None, devices: Collection[pb.Device]) -> dict[str, int]:
    """Return the engine's count by NVML's UUID. CUDA may give the UUID of a MIG instance's GPU."""
    if engine is None or not engine.num_bytes:
        return {}
    uuids = [device.uuid for device in devices]
    named = [uuid for uuid in uuids if uuid[_PREFIX_CHARACTERS:] == engine.device_uuid]
    [uuid] = named if len(named) == 1 else uuids if len(uuids) == 1 else [f"GPU-{engine.device_uuid}"]
    return {uuid: engine.num_bytes}


def _write(own_bytes: int | None, foreign_bytes: int | None, reason: str, device: pb.Device) -> None:
    if own_bytes is not None:
        device.own_bytes = own_bytes
    if foreign_bytes is not None:
        device.foreign_bytes = foreign_bytes
    device.foreign_unknown = reason
