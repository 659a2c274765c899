"""Exports the GPUs of a worker, as its memory probe reads them through NVML once a second.

A figure that is not known has no series. While NVML does not answer there is its silence alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from opentelemetry.metrics import CallbackOptions, Observation

from tandem.v1 import types_pb2 as pb
from tandem_runtime import metrics

WINDOW_SECONDS = 10.0
"""Shortest time over which energy per token is computed: NVML's counter moves in steps of tens of milliseconds."""

Labels = dict[str, str | int]


def export(
    memory: Callable[[], pb.MemoryReport],
    num_tokens: Callable[[], Mapping[str, float]],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Export the devices of `memory`; `num_tokens` are the totals of each phase. Both are called in any thread."""
    meter = metrics.meter()
    energy = EnergyPerToken(memory, num_tokens, clock)

    def gauge(name: str, unit: str, description: str, read: Callable[[pb.Device], Iterable[Observation]]) -> None:
        meter.create_observable_gauge(f"tandem.device.{name}", [_observed(memory, read)], unit, description)

    def counter(name: str, unit: str, description: str, read: Callable[[pb.Device], Iterable[Observation]]) -> None:
        meter.create_observable_counter(f"tandem.device.{name}", [_observed(memory, read)], unit, description)

    meter.create_observable_gauge(
        "tandem.device.silence", [_silence(memory)], "s", "Time that NVML has not answered; 0 while it answers."
    )
    gauge("memory", "By", "Memory of the device, by owner.", _memory)
    gauge("utilization", "1", "Share of time with a kernel running.", _utilization)
    gauge("power", "W", "Power draw.", _power)
    gauge("temperature", "Cel", "Temperature of the chip.", _temperature)
    gauge("throttled", "1", "1 for each reason that holds the clocks down now.", _throttled)
    counter("energy", "J", "Energy since the driver was loaded.", _energy)
    counter("xid_errors", "{error}", "XID errors since the worker started, by number.", _xid_errors)
    counter("ecc_errors", "{error}", "ECC errors since the driver was loaded.", _ecc_errors)
    meter.create_observable_gauge(
        "tandem.device.energy_per_token", [energy.observe], "J", "Energy per token of the last seconds with tokens."
    )


def _observed(
    memory: Callable[[], pb.MemoryReport], read: Callable[[pb.Device], Iterable[Observation]]
) -> Callable[[CallbackOptions], Iterator[Observation]]:
    def observations(options: CallbackOptions) -> Iterator[Observation]:
        report = memory()
        if not report.device_age_seconds:
            for device in report.devices:
                yield from read(device)

    return observations


def _silence(memory: Callable[[], pb.MemoryReport]) -> Callable[[CallbackOptions], Iterator[Observation]]:
    def observations(options: CallbackOptions) -> Iterator[Observation]:
        report = memory()
        if report.devices or report.device_age_seconds:
            yield Observation(report.device_age_seconds)

    return observations


def _name(device: pb.Device) -> str:
    """Return NVML's index, and of a MIG instance its ids behind it: "0", "0/3/0"."""
    return f"{device.index}/{device.mig_instance}" if device.mig_instance else str(device.index)


def _labels(device: pb.Device, **more: str | int) -> Labels:
    return {"device": _name(device), **more}


def _memory(device: pb.Device) -> Iterator[Observation]:
    if device.HasField("own_bytes"):
        yield Observation(device.own_bytes, _labels(device, owner="tandem"))
    if device.HasField("foreign_bytes"):
        yield Observation(device.foreign_bytes, _labels(device, owner="foreign"))
    if device.total_bytes:
        yield Observation(device.free_bytes, _labels(device, owner="free"))


def _utilization(device: pb.Device) -> Iterator[Observation]:
    if device.HasField("utilization_percent"):
        yield Observation(device.utilization_percent / 100, _labels(device))


def _power(device: pb.Device) -> Iterator[Observation]:
    if device.HasField("power_milliwatts"):
        yield Observation(device.power_milliwatts / 1000, _labels(device))


def _temperature(device: pb.Device) -> Iterator[Observation]:
    if device.HasField("temperature_celsius"):
        yield Observation(device.temperature_celsius, _labels(device))


def _throttled(device: pb.Device) -> Iterator[Observation]:
    for reason in device.throttle_reasons:
        yield Observation(1, _labels(device, reason=reason))


def _energy(device: pb.Device) -> Iterator[Observation]:
    if device.HasField("energy_millijoules"):
        yield Observation(device.energy_millijoules / 1000, _labels(device))


def _xid_errors(device: pb.Device) -> Iterator[Observation]:
    for xid, number in device.xid_errors.items():
        yield Observation(number, _labels(device, xid=xid))


def _ecc_errors(device: pb.Device) -> Iterator[Observation]:
    if device.HasField("num_corrected_ecc_errors"):
        yield Observation(device.num_corrected_ecc_errors, _labels(device, kind="corrected"))
    if device.HasField("num_uncorrected_ecc_errors"):
        yield Observation(device.num_uncorrected_ecc_errors, _labels(device, kind="uncorrected"))


class EnergyPerToken:
    """Divides the energy of each device by the tokens of this worker, over windows of WINDOW_SECONDS or more.

    Devices without memory of this worker are left out, unless there is one device only: in a container NVML may not
    know whose memory it is. Without tokens in the last window there is no value.
    """

    def __init__(
        self,
        memory: Callable[[], pb.MemoryReport],
        num_tokens: Callable[[], Mapping[str, float]],
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._num_tokens = num_tokens
        self._clock = clock
        self._begun_at = clock()
        self._begin: tuple[Mapping[str, float], Mapping[str, float]] = self._now()
        self._values: dict[tuple[str, str], float] = {}

    def observe(self, options: CallbackOptions) -> Iterator[Observation]:
        if self._clock() - self._begun_at >= WINDOW_SECONDS:
            self._end_window()
        for (name, phase), joules in self._values.items():
            yield Observation(joules, {"device": name, "phase": phase})

    def _end_window(self) -> None:
        (joules_before, tokens_before), (joules, tokens) = self._begin, self._now()
        self._values = {
            (name, phase): (joules[name] - joules_before[name]) / (number - tokens_before.get(phase, 0.0))
            for name in joules
            if name in joules_before
            for phase, number in tokens.items()
            if number > tokens_before.get(phase, 0.0)
        }
        self._begun_at, self._begin = self._clock(), (joules, tokens)

    def _now(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        devices = self._memory().devices
        joules = {
            _name(device): device.energy_millijoules / 1000
            for device in devices
            if device.HasField("energy_millijoules") and (device.own_bytes or len(devices) == 1)
        }
        return joules, dict(self._num_tokens())
