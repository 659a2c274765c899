"""Which figures of a worker does a metrics backend get?"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from tandem_engine.messages import EngineStats
from tandem_runtime import metrics


def export(stats: Callable[[], EngineStats | None]) -> None:
    """Offer the engine's figures as of its last step; free where no endpoint is configured.

    `stats` is called on the exporter's thread and returns a frozen value.
    """
    meter = metrics.meter()

    def requests(options: CallbackOptions) -> Iterable[Observation]:
        if (now := stats()) is not None:
            yield Observation(now.num_running, {"state": "running"})
            yield Observation(now.num_waiting, {"state": "waiting"})

    def blocks(options: CallbackOptions) -> Iterable[Observation]:
        if (now := stats()) is not None:
            yield Observation(now.num_free_blocks, {"state": "free"})
            yield Observation(now.num_cached_blocks, {"state": "cached"})
            yield Observation(now.num_used_blocks, {"state": "used"})

    def totals(options: CallbackOptions) -> Iterable[Observation]:
        if (now := stats()) is not None:
            for name, value in now.counters.items():
                yield Observation(value, {"name": name})

    meter.create_observable_gauge("tandem.worker.requests", [requests], "{request}", "Requests here, by state.")
    meter.create_observable_gauge("tandem.worker.kv_blocks", [blocks], "{block}", "Blocks of the KV pool, by state.")
    meter.create_observable_counter("tandem.worker.totals", [totals], "1", "The engine's totals since start, by name.")
