"""Exports the spans of a process over OTLP, and carries traces across processes.

Until `configure` finds an endpoint, only OpenTelemetry's API is imported and nothing is recorded.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tandem_runtime import otlp

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_EXPORT_INTERVAL_MS = 1000

_propagator = TraceContextTextMapPropagator()
_provider: TracerProvider | None = None
_tracer: trace.Tracer = trace.NoOpTracer()


def configure(service: str, endpoint: str | None, *, instance_id: str | None = None) -> None:
    """Export spans to the OTLP gRPC `endpoint`, else to OTEL_EXPORTER_OTLP_ENDPOINT, else nowhere.

    `instance_id` is the process's incarnation. An earlier configuration is flushed and replaced.
    """
    global _provider, _tracer
    shutdown()
    target = otlp.endpoint_for("traces", endpoint)
    if target is None:
        return
    _provider = _new_provider(service, instance_id, target)
    _tracer = _provider.get_tracer("tandem")


def is_configured() -> bool:
    return _provider is not None


def tracer() -> trace.Tracer:
    """Return the tracer of this process; its spans are no-ops until `configure`."""
    return _tracer


@contextmanager
def span(
    name: str,
    *,
    context: Context | None = None,
    kind: trace.SpanKind = trace.SpanKind.INTERNAL,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[trace.Span]:
    """Make a new span the current one inside the block. An exception sets its `error.type` and the status.

    OpenTelemetry's own way to do this would record the exception's message and traceback, which may quote a request.
    """
    with tracer().start_as_current_span(
        name,
        context=context,
        kind=kind,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as current:
        try:
            yield current
        except Exception as error:
            current.set_attribute("error.type", type(error).__name__)
            current.set_status(trace.StatusCode.ERROR)
            raise


def current_traceparent() -> str:
    """Return the W3C traceparent of the current span, "" outside of a trace."""
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def context_of(traceparent: str) -> Context:
    """Return a context in which new spans are children of the remote span `traceparent`."""
    return _propagator.extract({"traceparent": traceparent}, context=Context())


def attach(traceparent: str) -> None:
    """Make spans that the current task starts from now on children of the remote span `traceparent`."""
    if _provider is not None and traceparent:
        otel_context.attach(context_of(traceparent))


def record_span(
    name: str,
    traceparent: str,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> None:
    """Record a finished child of the remote span `traceparent`; times are Unix nanoseconds.

    Records nothing without a valid parent.
    """
    if _provider is None:
        return
    context = context_of(traceparent)
    if not trace.get_current_span(context).get_span_context().is_valid:
        return
    span = _tracer.start_span(name, context=context, start_time=start_ns, attributes=attributes)
    span.end(end_time=end_ns)


def shutdown() -> None:
    """Export pending spans within a few seconds, and stop recording."""
    global _provider, _tracer
    provider, _provider, _tracer = _provider, None, trace.NoOpTracer()
    if provider is not None:
        otlp.finish_within(provider.shutdown, otlp.SHUTDOWN_TIMEOUT_SECONDS)


atexit.register(shutdown)


def _new_provider(service: str, instance_id: str | None, endpoint: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(
        endpoint=endpoint, insecure=otlp.is_insecure(endpoint), timeout=otlp.EXPORT_TIMEOUT_SECONDS
    )
    provider = TracerProvider(resource=otlp.resource(service, instance_id), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_INTERVAL_MS))
    return provider
