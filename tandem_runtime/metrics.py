"""Exports the metrics of a process over OTLP.

Until `configure` finds an endpoint, only OpenTelemetry's API is imported and nothing is measured.
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

from opentelemetry.metrics import Meter, NoOpMeter

from tandem_runtime import otlp

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

_EXPORT_INTERVAL_MS = 10_000

_provider: MeterProvider | None = None
_meter: Meter = NoOpMeter("tandem")


def configure(service: str, endpoint: str | None, *, instance_id: str | None = None) -> None:
    """Export metrics to the OTLP gRPC `endpoint`, else to OTEL_EXPORTER_OTLP_ENDPOINT, else nowhere.

    `instance_id` is the process's incarnation. An earlier configuration is flushed and replaced.
    """
    global _provider, _meter
    shutdown()
    target = otlp.endpoint_for("metrics", endpoint)
    if target is None:
        return
    _provider = _new_provider(service, instance_id, target)
    _meter = _provider.get_meter("tandem")


def meter() -> Meter:
    """Return the meter of this process. Make instruments after `configure`: earlier ones stay no-ops."""
    return _meter


def shutdown() -> None:
    """Export a last reading within a few seconds, and stop measuring."""
    global _provider, _meter
    provider, _provider, _meter = _provider, None, NoOpMeter("tandem")
    if provider is not None:
        otlp.finish_within(provider.shutdown, otlp.SHUTDOWN_TIMEOUT_SECONDS)


atexit.register(shutdown)


def _new_provider(service: str, instance_id: str | None, endpoint: str) -> MeterProvider:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    exporter = OTLPMetricExporter(
        endpoint=endpoint, insecure=otlp.is_insecure(endpoint), timeout=otlp.EXPORT_TIMEOUT_SECONDS
    )
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=_EXPORT_INTERVAL_MS)
    return MeterProvider([reader], resource=otlp.resource(service, instance_id), shutdown_on_exit=False)
