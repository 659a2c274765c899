"""Collects everything that this process says about itself: log lines, spans and metrics, as one text."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

import pytest
import structlog
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tandem_runtime import lifecycle, log, metrics, tracing


class Telemetry:
    """What was logged, traced and measured so far."""

    def __init__(self, written: StringIO, spans: InMemorySpanExporter, reader: InMemoryMetricReader) -> None:
        self._written = written
        self._spans = spans
        self._reader = reader

    @property
    def log(self) -> str:
        return self._written.getvalue()

    @property
    def spans(self) -> str:
        return "\n".join(span.to_json() for span in self._spans.get_finished_spans())

    @property
    def metrics(self) -> str:
        data = self._reader.get_metrics_data()
        return data.to_json() if data is not None else ""

    def found(self, *marks: str) -> list[tuple[str, str]]:
        """Return each mark that is somewhere, with the line that has it."""
        lines = [(line, line.lower()) for line in "\n".join([self.log, self.spans, self.metrics]).splitlines()]
        return [(mark, line) for mark in marks for line, lowered in lines if mark.lower() in lowered]


@contextmanager
def collected(monkeypatch: pytest.MonkeyPatch, *, as_json: bool) -> Iterator[Telemetry]:
    """Log at level debug, record spans and measure inside the block, as a service would. Call in an event loop."""
    written, spans, reader = StringIO(), InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", written)
        patch.setattr(tracing, "_provider", provider)
        patch.setattr(tracing, "_tracer", provider.get_tracer("tandem"))
        patch.setattr(metrics, "_meter", MeterProvider([reader]).get_meter("tandem"))
        log.configure("tandem-control", as_json, level="debug")
        client = logging.getLogger("httpx")  # the test's client, which logs URLs; no service uses httpx
        patch.setattr(client, "disabled", True)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lifecycle.on_loop_exception)
        try:
            yield Telemetry(written, spans, reader)
        finally:
            gc.collect()  # tasks whose exception nobody has read are logged when they are collected
            loop.set_exception_handler(None)
            root.handlers, root.level = handlers, level
            structlog.reset_defaults()
