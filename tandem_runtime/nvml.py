"""Reads the GPUs that this process may use through NVML.

The calls block for a few milliseconds in total, and without end where the driver hangs: `device_reader` makes them, on
a thread of its own.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem_runtime.device_owners import DeviceUse
from tandem_runtime.nvml_devices import visible_devices
from tandem_runtime.nvml_events import XidEvents
from tandem_runtime.nvml_figures import read_figures

RETRY_SECONDS = 10.0
"""Seconds before a failed start of NVML is tried again."""


class NvmlUnavailable(Exception):
    """NVML cannot be used here; the message is the reason."""


class Nvml:
    """The NVML library. Starts with the first reading, and again after a GPU was lost. For one thread."""

    def __init__(self) -> None:
        self._started = False
        self._reason = ""
        self._retry_at = 0.0
        self._xid_events = XidEvents()

    def devices(self, engine_uuid: str = "") -> list[tuple[pb.Device, DeviceUse | None]]:
        """Read every visible device, and who uses its memory (None: not known); raises NvmlUnavailable.

        `engine_uuid` is the engine's device as CUDA gives it, "" while it is not known.
        """
        nvml = self._library()
        self._start(nvml)
        errors: list[Any] = []
        try:
            visible = visible_devices(nvml, engine_uuid)
            xids = self._xid_events.poll(nvml, sorted({entry.index for entry in visible}), errors)
            found = []
            for entry in visible:
                device, use = read_figures(nvml, entry, errors)
                for xid, number in xids.get(entry.index, {}).items():
                    device.xid_errors[xid] = number
                found.append((device, use))
            return found
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
