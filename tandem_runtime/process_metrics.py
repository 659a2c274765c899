"""Exports what every process has: processor time, memory, start time, and when its certificate expires."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

import psutil
from opentelemetry.metrics import CallbackOptions, Meter, Observation


class Loaded(Protocol):
    @property
    def expires_at(self) -> float:
        """Unix seconds."""


class Certificate(Protocol):
    @property
    def current(self) -> Loaded: ...


class Member(Protocol):
    @property
    def certificate(self) -> Certificate: ...


def export(meter: Meter) -> None:
    """Export the process itself."""
    process = psutil.Process()
    started_at = process.create_time()

    def memory(options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(process.memory_info().rss)]

    meter.create_observable_counter(
        "process.cpu.time", [lambda options: [Observation(time.process_time())]], "s", "Processor time of the process."
    )
    meter.create_observable_gauge("process.memory.usage", [memory], "By", "Resident memory of the process.")
    meter.create_observable_gauge(
        "tandem.process.start_time",
        [lambda options: [Observation(started_at)]],
        "s",
        "Start of the process in Unix time.",
    )


def export_certificate(meter: Meter, member: Member | None) -> None:
    """Export when the certificate of this process expires; nothing without one."""
    if member is None:
        return
    certificate = member.certificate
    meter.create_observable_gauge(
        "tandem.certificate.expiration_time",
        [lambda options: [Observation(certificate.current.expires_at)]],
        "s",
        "When the certificate of the process expires, Unix time.",
    )
