"""One request is one trace over processes, received by a real collector; tracing is free when off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import TablesReply
from tandem.v1.worker_pb2_grpc import WorkerServiceServicer, WorkerServiceStub, add_WorkerServiceServicer_to_server
from tandem_runtime import metrics, tracing
from tandem_runtime.channel import open_channel
from tandem_runtime.log import _add_trace
from tandem_runtime.server import GrpcServer
from tests.otlp_sink import OtlpSink

FOREIGN_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def off_before_and_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    yield
    tracing.shutdown()
    metrics.shutdown()


class Decode(WorkerServiceServicer):
    def __init__(self) -> None:
        self.traceparents: list[str] = []

    async def Drain(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Stats(self, request: Any, context: Any) -> pb.StatsReply:
        self.traceparents.append(tracing.current_traceparent())
        with tracing.tracer().start_as_current_span("answer"):
            return pb.StatsReply()

    async def Tables(self, request: Any, context: Any) -> TablesReply:
        return TablesReply()

    async def GetAsset(self, request: Any, context: Any) -> Any:
        with tracing.tracer().start_as_current_span("stream"):
            yield pb.Chunk()

    async def Attach(self, requests: Any, context: Any) -> Any:
        yield pb.Event()


async def test_spans_on_both_sides_of_a_call_and_recorded_ones_are_one_trace() -> None:
    servicer = Decode()
    async with OtlpSink() as sink:
        tracing.configure("tandem-test", sink.endpoint, instance_id="1f" * 8)
        server = GrpcServer("127.0.0.1:0", lambda s: add_WorkerServiceServicer_to_server(servicer, s), [])
        async with open_channel(await server.start()) as channel:
            stub: Any = WorkerServiceStub(channel)
            with tracing.tracer().start_as_current_span("request"):
                parent = tracing.current_traceparent()
                await stub.Stats(pb.StatsRequest())
                assert len([chunk async for chunk in stub.GetAsset(pb.AssetRequest())]) == 1
            await stub.Stats(pb.StatsRequest())
        await server.stop(0)
        tracing.record_span("decode.queue", parent, 1_000, 2_000, {"num_tokens": 7, "transport": "shm"})
        await sink.wait_for(lambda sink: len(sink.spans) == 5)
    [request] = sink.named("request")
    outside = [span for span in sink.named("answer") if span.trace_id != request.trace_id]
    assert len(outside) == 1 and outside[0].parent_span_id == ""
    trace = {span.name: span for span in sink.trace(request.trace_id)}
    assert trace.keys() == {"request", "answer", "stream", "decode.queue"}
    assert {trace[name].parent_span_id for name in ("answer", "stream", "decode.queue")} == {request.span_id}
    queue = trace["decode.queue"]
    assert (queue.start_ns, queue.end_ns) == (1_000, 2_000)
    assert queue.attributes == {"num_tokens": 7, "transport": "shm"}
    assert queue.resource["service.name"] == "tandem-test"
    assert queue.resource["service.instance.id"] == "1f" * 8
    assert servicer.traceparents == [parent, ""]


async def test_a_recorded_span_has_the_remote_parent_it_was_given_and_none_without() -> None:
    async with OtlpSink() as sink:
        tracing.configure("tandem-test", sink.endpoint)
        tracing.record_span("lost", "", 1, 2)
        tracing.record_span("lost", "nonsense", 1, 2)
        tracing.record_span("found", FOREIGN_PARENT, 1, 2)
        await sink.wait_for(lambda sink: bool(sink.spans))
    [span] = sink.spans
    assert (span.name, span.trace_id) == ("found", FOREIGN_PARENT.split("-")[1])
    assert span.parent_span_id == FOREIGN_PARENT.split("-")[2]


async def test_log_lines_inside_a_span_name_its_trace() -> None:
    async with OtlpSink() as sink:
        tracing.configure("tandem-test", sink.endpoint)
        with tracing.tracer().start_as_current_span("request"):
            inside = _add_trace(None, "info", {"event": "x"})
            _, trace_id, span_id, _ = tracing.current_traceparent().split("-")
        await asyncio.to_thread(tracing.shutdown)
    assert (inside["trace_id"], inside["span_id"]) == (trace_id, span_id)
    assert _add_trace(None, "info", {"event": "x"}) == {"event": "x"}


async def test_the_environment_names_the_collector_when_the_setting_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async with OtlpSink() as sink:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.endpoint)
        tracing.configure("tandem-test", None)
        tracing.tracer().start_span("s").end()
        await sink.wait_for(lambda sink: bool(sink.named("s")))


async def test_a_process_sends_its_last_spans_and_figures_as_it_ends() -> None:
    code = """
import asyncio, sys
from tandem_runtime import lifecycle, metrics, tracing
tracing.configure("p", sys.argv[1]); metrics.configure("p", sys.argv[1])
async def main(drain):
    metrics.meter().create_counter("tandem.tokens").add(3)
    tracing.tracer().start_span("last").end()
    return 0
sys.exit(lifecycle.run(main))
"""
    async with OtlpSink() as sink:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, sink.endpoint)
        try:
            await sink.wait_for(lambda sink: bool(sink.named("last")) and "tandem.tokens" in sink.metric_names)
            assert await child.wait() == 0
        finally:
            if child.returncode is None:
                child.kill()


def test_a_collector_that_is_away_does_not_keep_a_process_from_ending() -> None:
    tracing.configure("tandem-test", "http://127.0.0.1:9")
    tracing.tracer().start_span("unsent").end()
    started = time.monotonic()
    tracing.shutdown()
    assert time.monotonic() - started < 15


def test_tracing_that_is_off_costs_no_import_of_its_sdk_and_records_nothing() -> None:
    code = """
import sys
from tandem_runtime import metrics, tracing
tracing.configure("x", None); metrics.configure("x", None)
imported = [name for name in sys.modules if name.startswith(("opentelemetry.sdk.trace", "opentelemetry.exporter"))]
assert not imported, imported
with tracing.tracer().start_as_current_span("s"):
    assert tracing.current_traceparent() == ""
tracing.record_span("s", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", 1, 2)
metrics.meter().create_counter("c").add(1)
assert not tracing.is_configured()
assert b"c_total 1" in metrics.exposition().splitlines()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
