"""Reads the GPUs that this process may use through NVML.

The calls block for a few milliseconds in total. A figure that cannot be read stays 0 and is named in `Device.error`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem_runtime.nvml_events import XidEvents

RETRY_SECONDS = 10.0
"""Seconds before a failed start of NVML is tried again."""


class NvmlUnavailable(Exception):
    """NVML cannot be used here; the message is the reason."""


class Nvml:
    """The NVML library. Starts with the first reading, and again after a GPU was lost."""

    def __init__(self) -> None:
        self._started = False
        self._reason = ""
        self._retry_at = 0.0
        self._xid_events = XidEvents()

    def devices(self, own_pids: Collection[int]) -> list[pb.Device]:
        """Read every visible device; raises NvmlUnavailable. Memory of processes outside `own_pids` is foreign."""
        nvml = self._library()
        self._start(nvml)
        errors: list[Any] = []
        try:
            visible = _visible_devices(nvml)
            xids = self._xid_events.poll(nvml, [entry for entry in visible if isinstance(entry, int)], errors)
            return [_read_device(nvml, entry, own_pids, xids, errors) for entry in visible]
        except nvml.NVMLError as error:
            errors.append(error)
            raise NvmlUnavailable(f"NVML cannot list its devices: {error}") from error
        finally:
            if any(error.value in _lost(nvml) for error in errors):
                self._stop(nvml)

    def _library(self) -> Any:
        try:
            import pynvml
        except ImportError as error:
            raise NvmlUnavailable("nvidia-ml-py is not installed") from error
        return pynvml

    def _start(self, nvml: Any) -> None:
        if self._started:
            return
        if time.monotonic() < self._retry_at:
            raise NvmlUnavailable(self._reason)
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._reason = f"NVML does not start: {error}"
            self._retry_at = time.monotonic() + RETRY_SECONDS
            raise NvmlUnavailable(self._reason) from error
        self._started = True

    def _stop(self, nvml: Any) -> None:
        """Stop NVML; the next reading starts it again."""
        self._started = False
        self._xid_events.forget_set()
        with contextlib.suppress(nvml.NVMLError):  # NVML may be lost together with the card
            nvml.nvmlShutdown()


def _lost(nvml: Any) -> set[int]:
    return {
        nvml.NVML_ERROR_GPU_IS_LOST,
        nvml.NVML_ERROR_RESET_REQUIRED,
        nvml.NVML_ERROR_UNINITIALIZED,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        nvml.NVML_ERROR_UNKNOWN,
    }


# ------------------------------------------------------------------------------------------------- which devices


def _visible_devices(nvml: Any) -> list[str | int]:
    """Return NVML indices, or names that NVML does not know by index, in the order CUDA_VISIBLE_DEVICES gives them.

    As CUDA does, the list ends at its first entry that names no device. Indices are NVML's: on machines with unlike
    cards they are CUDA's too only under CUDA_DEVICE_ORDER=PCI_BUS_ID. MIG instances are named, not resolved.
    """
    count = nvml.nvmlDeviceGetCount()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(range(count))
    visible: list[str | int] = []
    for entry in (part.strip() for part in chosen.split(",")):
        found = entry if entry.startswith("MIG-") else _index_of(nvml, entry, count)
        if found is None:
            break
        visible.append(found)
    return visible


def _index_of(nvml: Any, entry: str, count: int) -> int | None:
    if entry.isdigit():
        return int(entry) if int(entry) < count else None
    if not entry.startswith("GPU-"):
        return None
    uuids = [nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
    matching = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


# ------------------------------------------------------------------------------------------------- one device


def _read_device(
    nvml: Any,
    entry: str | int,
    own_pids: Collection[int],
    xids: Mapping[int, Mapping[int, int]],
    errors: list[Any],
) -> pb.Device:
    """Read all figures of a device; each failure is appended to `errors`. `xids` are counts by device and number."""
    if isinstance(entry, str):
        return pb.Device(uuid=entry, error="MIG instances are not read")
    device = pb.Device(index=entry)
    failures: list[str] = []
    for name, read in _FIGURES:
        try:
            read(nvml, nvml.nvmlDeviceGetHandleByIndex(entry), device, own_pids)
        except nvml.NVMLError as error:
            failures.append(f"{name}: {error}")
            errors.append(error)
    device.error = "; ".join(failures)
    for xid, number in xids.get(entry, {}).items():
        device.xid_errors[xid] = number
    return device


def _name(nvml: Any, handle: Any, device: pb.Device, _: Collection[int]) -> None:
    device.name = nvml.nvmlDeviceGetName(handle)


def _uuid(nvml: Any, handle: Any, device: pb.Device, _: Collection[int]) -> None:
    device.uuid = nvml.nvmlDeviceGetUUID(handle)


def _memory(nvml: Any, handle: Any, device: pb.Device, _: Collection[int]) -> None:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    device.total_bytes, device.used_bytes, device.free_bytes = memory.total, memory.used, memory.free


def _foreign(nvml: Any, handle: Any, device: pb.Device, own_pids: Collection[int]) -> None:
    """Sum the memory of foreign processes. A process may be in both lists, with the same figure."""
    bytes_of: dict[int, int] = {}
    for processes in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in processes(handle):
            bytes_of[process.pid] = max(bytes_of.get(process.pid, 0), process.usedGpuMemory or 0)
    device.foreign_bytes = sum(used for pid, used in bytes_of.items() if pid not in own_pids)
    device.own_bytes = sum(used for pid, used in bytes_of.items() if pid in own_pids)


def _utilization(nvml: Any, handle: Any, device: pb.Device, _: Collection[int]) -> None:
    device.utilization_percent = nvml.nvmlDeviceGetUtilizationRates(handle).gpu


def _temperature(nvml: Any, handle: Any, device: pb.Device, _: Collection[int]) -> None:
    device.temperature_celsius = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)


def _power(nvml: Any, handle: Any, device: pb.Device, _: Collection[int]) -> None:
    device.power_milliwatts = nvml.nvmlDeviceGetPowerUsage(handle)


def _throttling(nvml: Any, handle: Any, device: pb.Device, _: Collection[int]) -> None:
    device.throttle_reasons.extend(throttle_reasons(_clock_event_reasons(nvml, handle)))


def _energy(nvml: Any, handle: Any, device: pb.Device, _: Collection[int]) -> None:
    with contextlib.suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):  # cards before Volta
        device.energy_millijoules = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)


def _ecc(nvml: Any, handle: Any, device: pb.Device, _: Collection[int]) -> None:
    with contextlib.suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):  # cards without ECC
        count, since = nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_VOLATILE_ECC
        device.num_corrected_ecc_errors = count(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, since)
        device.num_uncorrected_ecc_errors = count(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, since)


def _clock_event_reasons(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError_FunctionNotFound:  # drivers before 535 have the older name only
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


_FIGURES: list[tuple[str, Callable[[Any, Any, pb.Device, Collection[int]], None]]] = [
    ("name", _name),
    ("uuid", _uuid),
    ("memory", _memory),
    ("processes", _foreign),
    ("utilization", _utilization),
    ("temperature", _temperature),
    ("power", _power),
    ("throttle_reasons", _throttling),
    ("energy", _energy),
    ("ecc", _ecc),
]

_REASONS = {
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
_IDLE = 0x001  # low clocks because the GPU is idle: not throttling


def throttle_reasons(mask: int) -> list[str]:
    """Name the bits of NVML's clock event reasons; a bit of a newer driver is named by its value."""
    bits = [1 << position for position in range(mask.bit_length()) if mask >> position & 1]
    return [_REASONS.get(bit, f"reason_{bit:#x}") for bit in bits if bit != _IDLE]
