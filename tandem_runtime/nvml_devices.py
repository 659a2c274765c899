"""Finds the devices that CUDA gives this process: GPUs, and MIG instances of GPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_BY_BUS = "PCI_BUS_ID"
"""The order that `tandem_engine.client` gives an engine, if the environment has none."""


@dataclass(frozen=True)
class Entry:
    """A device as CUDA counts it: a GPU, or one MIG instance."""

    index: int
    """NVML's index of the GPU."""
    handle: Any
    """NVML's handle: of the instance, if it is one. None: there is no such instance, and `error` says so."""
    gpu: Any
    """The handle of the GPU."""
    mig_instance: str = ""
    """"GI/CI"; "": the whole GPU."""
    uuid: str = ""
    """Known for MIG instances; of GPUs it is read with the other figures."""
    error: str = ""


def visible_devices(nvml: Any, engine_uuid: str = "") -> list[Entry]:
    """Return the devices in the order of CUDA_VISIBLE_DEVICES, without it all GPUs; raises NVMLError.

    As CUDA does, the list ends at its first entry that names no device, and of a GPU in MIG mode that is not named by
    an instance it takes the first instance. NVML counts by bus, and so does CUDA in our engines unless
    CUDA_DEVICE_ORDER says otherwise: where an index may mean another GPU, this is the GPU with `engine_uuid` (the
    engine's own device as CUDA gives it, without prefix), and all GPUs while that is "".
    """
    count = nvml.nvmlDeviceGetCount()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [_gpu(nvml, index) for index in range(count)]
    names = [part.strip() for part in chosen.split(",")]
    if any(name.isdigit() for name in names) and not _indices_agree(nvml, count):
        gpus = [_gpu(nvml, index) for index in range(count)]
        own = [each for each in gpus if engine_uuid and nvml.nvmlDeviceGetUUID(each.gpu).endswith(engine_uuid)]
        return own or gpus
    visible: list[Entry] = []
    for name in names:
        found = _named(nvml, name, count)
        if found is None:
            break
        visible.append(found)
    return visible


def _indices_agree(nvml: Any, count: int) -> bool:
    """Return whether an index means the same GPU to CUDA and to NVML."""
    if os.environ.get("CUDA_DEVICE_ORDER", _BY_BUS) == _BY_BUS:
        return True
    return len({nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)}) <= 1


def _named(nvml: Any, name: str, count: int) -> Entry | None:
    if name.isdigit():
        return _gpu(nvml, int(name)) if int(name) < count else None
    if name.startswith("MIG-"):
        return _only([each for each in _all_instances(nvml, count) if _is_instance(nvml, each, name)])
    if name.startswith("GPU-"):
        gpus = [_gpu(nvml, index) for index in range(count)]
        return _only([each for each in gpus if nvml.nvmlDeviceGetUUID(each.gpu).startswith(name)])
    return None


def _only(found: Sequence[Entry]) -> Entry | None:
    return found[0] if len(found) == 1 else None


def _is_instance(nvml: Any, entry: Entry, name: str) -> bool:
    """Match MIG-<uuid>, and MIG-GPU-<uuid of the GPU>/<GI>/<CI> of drivers before 470."""
    if not name.startswith("MIG-GPU-"):
        return entry.uuid.startswith(name)
    gpu, _, ids = name.removeprefix("MIG-").partition("/")
    return bool(nvml.nvmlDeviceGetUUID(entry.gpu) == gpu) and ids == entry.mig_instance


def _gpu(nvml: Any, index: int) -> Entry:
    """Return a GPU, or its first instance if it is in MIG mode."""
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    if not _is_in_mig_mode(nvml, gpu):
        return Entry(index, gpu, gpu)
    return next(
        _instances(nvml, index, gpu),
        Entry(index, None, gpu, error="the GPU is in MIG mode, and none of its instances can be used here"),
    )


def _is_in_mig_mode(nvml: Any, gpu: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(gpu)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError:  # GPUs and drivers without MIG; a lost GPU, which reading its figures finds
        return False


def _all_instances(nvml: Any, count: int) -> Iterator[Entry]:
    for index in range(count):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        if _is_in_mig_mode(nvml, gpu):
            yield from _instances(nvml, index, gpu)


def _instances(nvml: Any, index: int, gpu: Any) -> Iterator[Entry]:
    """Yield the instances that this process may see; the places of others are empty."""
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        with contextlib.suppress(nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place)
            ids = f"{nvml.nvmlDeviceGetGpuInstanceId(handle)}/{nvml.nvmlDeviceGetComputeInstanceId(handle)}"
            yield Entry(index, handle, gpu, ids, nvml.nvmlDeviceGetUUID(handle))
