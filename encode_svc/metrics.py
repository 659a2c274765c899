"""Exports what an encode worker's engine has done."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from tandem_engine.encoder.messages import EncoderStats
from tandem_runtime import metrics


def export_metrics(stats: Callable[[], EncoderStats | None]) -> None:
    """Export the engine's stats after its last step; costs nothing if no endpoint is configured.

    `stats` is called on the exporter's thread and returns a frozen value.
    """
    meter = metrics.meter()

    def requests(options: CallbackOptions) -> Iterable[Observation]:
        if (now := stats()) is not None:
            yield Observation(now.num_running, {"state": "running"})
            yield Observation(now.num_waiting, {"state": "waiting"})

    def totals(options: CallbackOptions) -> Iterable[Observation]:
        if (now := stats()) is not None:
            for name, value in now.counters.items():
                yield Observation(value, {"name": name})

    meter.create_observable_gauge("tandem.worker.requests", [requests], "{request}", "Requests here, by state.")
    meter.create_observable_counter("tandem.worker.totals", [totals], "1", "The engine's totals since start, by name.")
