"""Reads the figures of one device through NVML. A figure that cannot be read is absent, and named in `Device.error`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem_runtime.device_owners import DeviceUse
from tandem_runtime.nvml_devices import Entry


def read_figures(nvml: Any, entry: Entry, errors: list[Any]) -> tuple[pb.Device, DeviceUse | None]:
    """Read all figures of a device, and who uses its memory; each failure is appended to `errors`.

    A MIG instance has name, UUID and memory of its own. Temperature and clocks are its GPU's. Utilization, power,
    energy and ECC errors are not known: NVML gives them for the whole GPU alone.
    """
    device = pb.Device(index=entry.index, uuid=entry.uuid, mig_instance=entry.mig_instance, error=entry.error)
    if entry.handle is None:
        return device, None
    failures: list[str] = []

    def attempt(name: str, read: Callable[[Any, Any, pb.Device], Any], handle: Any) -> Any:
        try:
            return read(nvml, handle, device)
        except nvml.NVMLError as error:
            failures.append(f"{name}: {error}")
            errors.append(error)
            return None

    for name, read in _OF_THE_DEVICE:
        attempt(name, read, entry.handle)
    reserved_bytes = attempt("memory", _memory, entry.handle)
    processes = attempt("processes", _processes, entry.handle)
    for name, read in _OF_THE_GPU if entry.mig_instance else [*_OF_A_WHOLE_GPU, *_OF_THE_GPU]:
        attempt(name, read, entry.gpu)
    device.error = "; ".join(failures)
    return device, DeviceUse(processes, device.used_bytes, reserved_bytes) if device.total_bytes else None


def _name(nvml: Any, handle: Any, device: pb.Device) -> None:
    device.name = nvml.nvmlDeviceGetName(handle)


def _uuid(nvml: Any, handle: Any, device: pb.Device) -> None:
    device.uuid = nvml.nvmlDeviceGetUUID(handle)


def _memory(nvml: Any, handle: Any, device: pb.Device) -> int | None:
    """Return the driver's own part of the used bytes, which they include; None from drivers before 510."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    device.total_bytes, device.used_bytes, device.free_bytes = memory.total, memory.used, memory.free
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).reserved)
    except nvml.NVMLError:
        return None


def _processes(nvml: Any, handle: Any, device: pb.Device) -> dict[int, int | None]:
    """Return the memory of each process. One may be in both lists, and twice in one, with the same figure."""
    bytes_of: dict[int, int | None] = {}
    for list_processes in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            listed = list_processes(handle)
        except nvml.NVMLError_NotSupported:
            if list_processes is nvml.nvmlDeviceGetComputeRunningProcesses:
                raise
            continue  # MIG instances and cards for data centres draw nothing
        for process in listed:
            before, now = bytes_of.get(process.pid), process.usedGpuMemory
            bytes_of[process.pid] = before if now is None else max(before or 0, now)
    return bytes_of


def _utilization(nvml: Any, handle: Any, device: pb.Device) -> None:
    device.utilization_percent = nvml.nvmlDeviceGetUtilizationRates(handle).gpu


def _temperature(nvml: Any, handle: Any, device: pb.Device) -> None:
    device.temperature_celsius = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)


def _power(nvml: Any, handle: Any, device: pb.Device) -> None:
    device.power_milliwatts = nvml.nvmlDeviceGetPowerUsage(handle)


def _throttling(nvml: Any, handle: Any, device: pb.Device) -> None:
    device.throttle_reasons.extend(throttle_reasons(_clock_event_reasons(nvml, handle)))


def _energy(nvml: Any, handle: Any, device: pb.Device) -> None:
    with contextlib.suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):  # cards before Volta
        device.energy_millijoules = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)


def _ecc(nvml: Any, handle: Any, device: pb.Device) -> None:
    with contextlib.suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):  # cards without ECC
        count, since = nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_VOLATILE_ECC
        device.num_corrected_ecc_errors = count(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, since)
        device.num_uncorrected_ecc_errors = count(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, since)


def _clock_event_reasons(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError_FunctionNotFound:  # drivers before 535 have the older name only
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


_Figures = list[tuple[str, Callable[[Any, Any, pb.Device], None]]]
_OF_THE_DEVICE: _Figures = [("name", _name), ("uuid", _uuid)]
_OF_A_WHOLE_GPU: _Figures = [("utilization", _utilization), ("power", _power), ("energy", _energy), ("ecc", _ecc)]
_OF_THE_GPU: _Figures = [("temperature", _temperature), ("throttle_reasons", _throttling)]

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
