"""Counts the XID errors of GPUs: faults that the driver reports as events.

https://docs.nvidia.com/deploy/xid-errors/. The driver queues events between two polls. A poll does not wait.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_EVENTS = 64
"""Of one poll: a card that is broken may report without end."""
_MAX_NUMBERS = 64
"""Kinds of errors kept per device; NVIDIA lists some 150, a card shows a few."""


class XidEvents:
    """The XID errors of this process's devices since it started. For the thread that reads NVML."""

    def __init__(self) -> None:
        self._set: Any = None
        self._indices: tuple[int, ...] = ()
        self._counts: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def poll(self, nvml: Any, indices: Sequence[int], errors: list[Any]) -> Mapping[int, Mapping[int, int]]:
        """Take the events that have come; return all counts so far, by device index and XID.

        A failure is appended to `errors`. Drivers and cards without events leave the counts empty.
        """
        try:
            if tuple(indices) != self._indices or self._set is None:
                self._register(nvml, indices)
            self._take(nvml)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            return self._counts
        except nvml.NVMLError as error:
            errors.append(error)
        return self._counts

    def forget_set(self) -> None:
        """NVML was stopped: the driver forgets the registration. The counts stay."""
        self._set = None

    def _register(self, nvml: Any, indices: Sequence[int]) -> None:
        if self._set is not None:
            nvml.nvmlEventSetFree(self._set)
        self._set, self._indices = nvml.nvmlEventSetCreate(), tuple(indices)
        for index in indices:
            with contextlib.suppress(nvml.NVMLError_NotSupported):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)

    def _take(self, nvml: Any) -> None:
        for _ in range(_MAX_EVENTS):
            try:
                event = nvml.nvmlEventSetWait_v2(self._set, 0)
            except nvml.NVMLError_Timeout:
                return
            counts, xid = self._counts[nvml.nvmlDeviceGetIndex(event.device)], int(event.eventData)
            if xid in counts or len(counts) < _MAX_NUMBERS:
                counts[xid] += 1
