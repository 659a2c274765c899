"""A request is one trace over all processes, with a span per phase."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx

from tests.otlp_sink import OtlpSink
from tests.ports import free_ports
from tests.system.conftest import SMALL
from tests.system.fleet import until
from tests.system.streams import MODEL, stream

SPANS = {
    "tokenize",
    "route",
    "kv.lookup",
    "prefill.queue",
    "prefill.compute",
    "kv.transfer",
    "decode.queue",
    "decode.first_token",
    "decode.stream",
}


async def test_one_trace_holds_every_phase_of_a_request(tmp_path: Path) -> None:
    """All four services as processes of their own, each with the sink as its OTLP endpoint."""
    processes: list[subprocess.Popen[bytes]] = []
    log = (tmp_path / "log").open("ab")

    def start(module: str, *flags: str) -> None:
        command = [sys.executable, "-m", module, "--otlp-endpoint", sink.endpoint, *flags]
        env = {**os.environ, "TANDEM_STATE_DIR": str(tmp_path), "OTEL_BSP_SCHEDULE_DELAY": "200"}
        processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))

    async with OtlpSink() as sink, httpx.AsyncClient(timeout=60) as http:
        try:
            ports = free_ports(2)
            http.base_url = httpx.URL(f"http://127.0.0.1:{ports[0]}")
            control = ("--control", f"127.0.0.1:{ports[1]}")
            start("decode_svc", *control, *SMALL)  # in any order
            start("kv_transfer_svc", *control)
            start("prefill_svc", *control, *SMALL)
            listen = ("--listen", f"127.0.0.1:{ports[0]}", "--grpc-listen", f"127.0.0.1:{ports[1]}")
            start("control_plane", *listen, "--local-prefill", "never")  # all phases, however fast the two are

            async def all_four_are_ready() -> bool:
                try:
                    workers = (await http.get("/v1/workers")).json()["data"]
                except httpx.TransportError:
                    return False
                ready = [worker["role"] for worker in workers if worker["state"] == "ready"]
                if sorted(ready) != ["decode", "kv", "prefill"]:
                    return False
                return (await http.get("/readyz", params={"model": MODEL})).status_code == 200

            await until(all_four_are_ready, 90, (tmp_path / "log").read_text)
            await stream(http, {"prompt": "What is a KV cache? " * 10, "max_tokens": 8, "seed": 1})
            wanted = f"chat {MODEL}"
            await sink.wait_for(
                lambda sink: any(
                    {span.name for span in sink.trace(root.trace_id)} >= SPANS for root in sink.named(wanted)
                ),
                seconds=30,
            )
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                await asyncio.to_thread(process.wait, 30)
            log.close()

        root = sink.named(wanted)[0]
        spans = {span.name: span for span in sink.trace(root.trace_id)}
        assert all(spans[name].parent_span_id == root.span_id for name in SPANS), "siblings, not a chain"
        assert all(root.start_ns <= spans[name].start_ns <= spans[name].end_ns for name in SPANS)
        assert {spans[name].resource["service.name"] for name in SPANS} == {
            "tandem-control",
            "tandem-prefill",
            "tandem-decode",
        }
        assert root.attributes["gen_ai.request.model"] == MODEL
        assert root.attributes["gen_ai.usage.output_tokens"] <= 8
        computed = spans["prefill.compute"].attributes
        assert (
            computed["tandem.tokens.computed"] + computed["tandem.tokens.cached"]
            == root.attributes["gen_ai.usage.input_tokens"]
        )
        assert spans["kv.transfer"].attributes["tandem.kv.bytes"] > 0
        assert sink.metric_names >= {"tandem.worker.kv_blocks", "tandem.worker.requests", "tandem.worker.steps"}
        assert any("time_to_first_token" in name for name in sink.metric_names)
