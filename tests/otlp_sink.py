"""A real OTLP gRPC receiver in the test's process; collects spans and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True)
class ReceivedSpan:
    """Ids are lower-case hex; `resource` describes the process that recorded the span."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    resource: dict[str, Any] = field(default_factory=dict)


class OtlpSink:
    """`async with OtlpSink() as sink:` listens on `sink.endpoint` and keeps what comes, in order of arrival."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.metric_names: set[str] = set()
        self.texts: list[str] = []
        """All that came, as protobuf text."""
        self.endpoint = ""
        self._changed = asyncio.Condition()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(self), self._server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._server)

    async def __aenter__(self) -> OtlpSink:
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    async def wait_for(self, condition: Callable[[OtlpSink], bool], seconds: float = 20) -> None:
        """Return once `condition` holds; TimeoutError names the spans that did come."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: condition(self))
        except TimeoutError:
            raise TimeoutError(f"of the spans waited for came {sorted({span.name for span in self.spans})}") from None

    async def receive(self, spans: list[ReceivedSpan], metric_names: set[str]) -> None:
        async with self._changed:
            self.spans += spans
            self.metric_names |= metric_names
            self._changed.notify_all()


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, sink: OtlpSink) -> None:
        self._sink = sink

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, _context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        spans = [
            _received(span, resource_spans.resource.attributes)
            for resource_spans in request.resource_spans
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        ]
        self._sink.texts.append(str(request))
        await self._sink.receive(spans, set())
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, sink: OtlpSink) -> None:
        self._sink = sink

    async def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, _context: object
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        names = {
            metric.name
            for resource_metrics in request.resource_metrics
            for scope_metrics in resource_metrics.scope_metrics
            for metric in scope_metrics.metrics
        }
        self._sink.texts.append(str(request))
        await self._sink.receive([], names)
        return metrics_service_pb2.ExportMetricsServiceResponse()


def _received(span: Any, resource: Any) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_plain(span.attributes),
        resource=_plain(resource),
    )


def _plain(pairs: list[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
