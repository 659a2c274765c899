"""Exports the GPUs of a worker, as its memory probe reads them through NVML once a second."""

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
        for device in memory().devices:
            yield from read(device)

    return observations


def _labels(device: pb.Device, **more: str | int) -> Labels:
    return {"device": device.index, **more}


def _memory(device: pb.Device) -> Iterator[Observation]:
    foreign_bytes = min(device.foreign_bytes, device.used_bytes)
    yield Observation(device.used_bytes - foreign_bytes, _labels(device, owner="tandem"))
    yield Observation(foreign_bytes, _labels(device, owner="foreign"))
    yield Observation(device.free_bytes, _labels(device, owner="free"))


def _utilization(device: pb.Device) -> Iterator[Observation]:
    yield Observation(device.utilization_percent / 100, _labels(device))


def _power(device: pb.Device) -> Iterator[Observation]:
    yield Observation(device.power_milliwatts / 1000, _labels(device))


def _temperature(device: pb.Device) -> Iterator[Observation]:
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
        self._begin: tuple[Mapping[int, float], Mapping[str, float]] = self._now()
        self._values: dict[tuple[int, str], float] = {}

    def observe(self, options: CallbackOptions) -> Iterator[Observation]:
        if self._clock() - self._begun_at >= WINDOW_SECONDS:
            self._end_window()
        for (index, phase), joules in self._values.items():
            yield Observation(joules, {"device": index, "phase": phase})

    def _end_window(self) -> None:
        (joules_before, tokens_before), (joules, tokens) = self._begin, self._now()
        self._values = {
            (index, phase): (joules[index] - joules_before[index]) / (number - tokens_before.get(phase, 0.0))
            for index in joules
            if index in joules_before
            for phase, number in tokens.items()
            if number > tokens_before.get(phase, 0.0)
        }
        self._begun_at, self._begin = self._clock(), (joules, tokens)

    def _now(self) -> tuple[Mapping[int, float], Mapping[str, float]]:
        devices = self._memory().devices
        joules = {
            device.index: device.energy_millijoules / 1000
            for device in devices
            if device.HasField("energy_millijoules") and (device.own_bytes or len(devices) == 1)
        }
        return joules, dict(self._num_tokens())
