"""Reports the device memory that this engine process holds, by its own count.

NVML cannot always tell whose memory a device's is: in a container it may name processes by the host's pids, or give
them 0 bytes. The front then takes this figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tandem_engine.messages import DeviceMemoryUsed

_SECONDS = 1.0
"""Between two looks: the statistics of torch's allocator take 0.1 ms."""

_outside_torch_bytes = 0


def hold(num_bytes: int) -> None:
    """Count device memory that this process took without torch; negative: gave back. For the engine's thread."""
    global _outside_torch_bytes
    _outside_torch_bytes += num_bytes


class DeviceMemory:
    """Finds changes of the device memory in use. For the engine's thread; the model is loaded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._look_at = 0.0
        self._last: DeviceMemoryUsed | None = None

    def change(self) -> DeviceMemoryUsed | None:
        """Return the memory now if it has changed since the last call; looks once a second at most."""
        now = self._clock()
        if self._last is not None and now < self._look_at:
            return None
        self._look_at = now + _SECONDS
        used = _used()
        if used == self._last:
            return None
        self._last = used
        return used


def _used() -> DeviceMemoryUsed:
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return DeviceMemoryUsed("", _outside_torch_bytes)
    device = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    return DeviceMemoryUsed(str(uuid), torch.cuda.memory_reserved(device) + _outside_torch_bytes)
