"""Tests that a metrics backend receives the stats of every link."""

from __future__ import annotations

import asyncio

from kv_transfer_svc.transport.stats import export_gauges
from tandem.v1 import types_pb2 as pb
from tandem_runtime import metrics
from tests.otlp_sink import OtlpSink


async def test_links_are_exported_as_gauges_and_totals() -> None:
    async with OtlpSink() as sink:
        metrics.configure("tandem-kv", sink.endpoint)
        export_gauges(lambda: [pb.KvLink(address="10.0.0.2:7", transport="tcp", bytes_per_second=1e9, num_errors=2)])
        await asyncio.to_thread(metrics.shutdown)  # flushes to the sink, which runs on this loop
        names = ("bytes_per_second", "latency", "is_impaired", "errors", "bytes", "transfers", "fallbacks")
        await sink.wait_for(lambda it: {f"tandem.kv.link.{name}" for name in names} <= it.metric_names)
