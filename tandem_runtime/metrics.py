"""Measures a process: instruments, readings as Prometheus text, and the same over OTLP if there is an endpoint.

OpenTelemetry's SDK is always on. A reading calls the instruments' callbacks and takes some milliseconds, so it is made
in a thread. Histograms of seconds have the boundaries `SECONDS`; over OTLP they are exponential instead.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from opentelemetry.metrics import Meter, NoOpMeter

from tandem_runtime import otlp
from tandem_runtime.short_turns import beside_the_loop

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader

    from tandem_runtime.metric_reader import SnapshotReader

_EXPORT_INTERVAL_MS = 10_000
_FIRST_SECONDS = 0.001
_LAST_SECONDS = 60.0
_STEP = 1.1


def _steps() -> tuple[float, ...]:
    boundaries = [_FIRST_SECONDS]
    while (after := _FIRST_SECONDS * _STEP ** len(boundaries)) < _LAST_SECONDS:
        boundaries.append(float(f"{after:.4g}"))
    return (*boundaries, _LAST_SECONDS)


SECONDS = _steps()
"""Boundaries of durations: steps of 1.1 from 1 ms to 60 s, so that a percentile is known to a few percent.

OpenTelemetry's defaults (0, 5, 10, 25 ...) are of milliseconds: of seconds, all below 5 would be in one bucket.
"""


_provider: MeterProvider | None = None
_reader: SnapshotReader | None = None
_meter: Meter = NoOpMeter("tandem")
_reading = threading.Lock()


def configure(service: str, endpoint: str | None, *, instance_id: str | None = None) -> None:
    """Measure from now on; also export to the OTLP gRPC `endpoint`, else to OTEL_EXPORTER_OTLP_ENDPOINT, if set.

    `instance_id` is the process's incarnation. An earlier configuration is flushed and replaced.
    """
    global _provider, _reader, _meter
    from tandem_runtime import process_metrics
    from tandem_runtime.metric_reader import SnapshotReader

    shutdown()
    _reader = SnapshotReader()
    _provider = _new_provider(service, instance_id, _reader, otlp.endpoint_for("metrics", endpoint))
    _meter = _provider.get_meter("tandem")
    process_metrics.export(_meter)


def meter() -> Meter:
    """Return the meter of this process. Make instruments after `configure`: earlier ones stay no-ops."""
    return _meter


def exposition() -> bytes:
    """Return a reading in Prometheus' text format; b"" before `configure`. Takes milliseconds: call in a thread."""
    return b"".join(pieces())


def pieces() -> Iterator[bytes]:
    """Yield the same in pieces of some 64 KiB. Callers take turns, because the SDK reads for one at a time."""
    from tandem_runtime import prometheus_text

    with beside_the_loop():
        with _reading:
            data = _reader.read() if _reader is not None else None
        if data is not None:
            yield from prometheus_text.render(data)


def shutdown() -> None:
    """Export a last reading within a few seconds, and stop measuring."""
    global _provider, _reader, _meter
    provider, _provider, _reader, _meter = _provider, None, None, NoOpMeter("tandem")
    if provider is not None:
        otlp.finish_within(provider.shutdown, otlp.SHUTDOWN_TIMEOUT_SECONDS)


atexit.register(shutdown)


def _new_provider(service: str, instance_id: str | None, reader: SnapshotReader, endpoint: str | None) -> MeterProvider:
    from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider

    readers: list[MetricReader] = [reader]
    if endpoint is not None:
        readers.append(_otlp_reader(endpoint))
    return MeterProvider(
        readers,
        resource=otlp.resource(service, instance_id),
        exemplar_filter=AlwaysOffExemplarFilter(),
        shutdown_on_exit=False,
    )


def _otlp_reader(endpoint: str) -> MetricReader:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import Histogram
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation

    exporter = OTLPMetricExporter(
        endpoint=endpoint,
        insecure=otlp.is_insecure(endpoint),
        timeout=otlp.EXPORT_TIMEOUT_SECONDS,
        preferred_aggregation={Histogram: ExponentialBucketHistogramAggregation()},
    )
    return PeriodicExportingMetricReader(exporter, export_interval_millis=_EXPORT_INTERVAL_MS)
