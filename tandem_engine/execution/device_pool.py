"""Makes the tensor of a KV pool that lies in device memory which other processes map.

On CUDA the tensor is over the address that the driver mapped; torch did not allocate it and never frees it. With the
stub driver of tests the address is one of this process, and the tensor is a CPU tensor.
"""

from __future__ import annotations

import ctypes
import weakref

import torch

from tandem_engine.errors import ModelUnusable
from tandem_engine.execution.cuda_vmm import LIBRARY, Driver, DriverError, DriverUnavailable
from tandem_engine.execution.device_region import DeviceRegion


def allocate_region(device: torch.device, num_slots: int, bytes_per_slot: int, library: str = LIBRARY) -> DeviceRegion:
    """Allocate a pool for `--kv-region device`; raises ModelUnusable, whose message names the remedy."""
    try:
        driver = Driver(ordinal_of(device), library)
        if device.type != "cuda" and not driver.is_host_addressable:
            raise ModelUnusable(
                f"--kv-region device, but the model runs on {device.type}; take --kv-region host, or --device cuda"
            )
        return DeviceRegion(driver, num_slots, bytes_per_slot)
    except DriverUnavailable as error:
        raise ModelUnusable(f"--kv-region device is not possible here: {error}; take --kv-region host") from error
    except DriverError as error:
        raise ModelUnusable(
            f"--kv-region device: {num_slots:,} blocks of {bytes_per_slot:,} bytes were not allocated: {error}; "
            "take a smaller pool with --kv-memory-bytes, or --kv-region host"
        ) from error


def rows_of(region: DeviceRegion, device: torch.device, num_slots: int, bytes_per_slot: int) -> torch.Tensor:
    """Return the region's slots as zeros, [num_slots, bytes_per_slot], uint8; the tensor keeps the memory mapped."""
    num_bytes = num_slots * bytes_per_slot
    if device.type == "cuda":
        rows: torch.Tensor = torch.as_tensor(_DeviceArray(region, num_bytes), device=device)
    else:
        content = (ctypes.c_ubyte * num_bytes).from_address(region.memory.address)
        weakref.finalize(content, _keep, region).atexit = False
        rows = torch.frombuffer(content, dtype=torch.uint8)
    rows.zero_()
    return rows.view(num_slots, bytes_per_slot)


def ordinal_of(device: torch.device) -> int:
    """Return the number of a CUDA device, as this process counts them; 0 for others."""
    if device.type != "cuda":
        return 0
    return device.index if device.index is not None else torch.cuda.current_device()


class _DeviceArray:
    """Describes device memory to torch (numba's CUDA array interface, version 3), which keeps this object alive."""

    def __init__(self, region: DeviceRegion, num_bytes: int) -> None:
        self._region = region
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (region.memory.address, False),
            "version": 3,
        }


def _keep(region: DeviceRegion) -> None:
    """Called when the last tensor is gone: until then the finalizer holds the region."""
