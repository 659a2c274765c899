"""Real services, whose workers die and whose clients err, log and trace no prompt, key or header."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.otlp_sink import OtlpSink
from tests.ports import free_ports
from tests.system.conftest import SMALL
from tests.system.fleet import until
from tests.system.streams import MODEL

MARKS = {name: f"zq{name}qz" for name in ("prompt", "token", "header", "model", "session", "salt", "grammar", "tool")}
BAD_TOKENS = {"authorization": f"Bearer tdm_{MARKS['token']}"}
HEADERS = {"x-session-affinity": MARKS["session"], "user-agent": MARKS["header"], **BAD_TOKENS}
ASK: dict[str, Any] = {"model": MODEL, "prompt": f"My secret is {MARKS['prompt']}.", "max_tokens": 800}
RUN = "/client/v4/accounts/me/ai/run"


async def test_no_secret_is_in_any_log_span_or_metric_of_any_service(tmp_path: Path) -> None:
    """The gateway logs for people, the worker as JSON. The test of the API has more errors, in both forms."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    log = tmp_path / "log"

    def start(module: str, *flags: str) -> None:
        command = [sys.executable, "-m", module, "--otlp-endpoint", sink.endpoint, *flags]
        env = {
            **os.environ,
            "TANDEM_STATE_DIR": str(tmp_path / "state"),
            "TANDEM_INSECURE_PLAINTEXT": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        with log.open("ab") as out:
            processes[module] = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)

    async with OtlpSink() as sink, httpx.AsyncClient(timeout=60, headers=HEADERS) as http:
        ports = free_ports(2)
        http.base_url = httpx.URL(f"http://127.0.0.1:{ports[0]}")
        control = ("--control", f"127.0.0.1:{ports[1]}", "--log-json", "true")
        try:
            listen = (
                "--listen",
                f"127.0.0.1:{ports[0]}",
                "--grpc-listen",
                f"127.0.0.1:{ports[1]}",
                "--log-json",
                "false",
            )
            start("control_plane", *listen, "--queue-seconds", "1")
            start("decode_svc", *control, *SMALL)

            async def is_ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return (await http.get("/readyz")).status_code == 200
                return False

            await until(is_ready, 90, log.read_text)
            await _err(http)
            async with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
                lines = response.aiter_lines()
                await anext(lines)
                processes["decode_svc"].send_signal(signal.SIGKILL)
                with contextlib.suppress(httpx.HTTPError):  # the stream ends with an error event, and is cut
                    async for _ in lines:
                        pass
            assert (await http.post("/v1/completions", json=ASK)).status_code in (404, 429, 503)
        finally:
            for process in processes.values():
                process.terminate()
            for process in processes.values():
                await asyncio.to_thread(process.wait, 30)
        await sink.wait_for(lambda sink: "gen_ai.server.request.duration" in sink.metric_names, seconds=30)
        written = log.read_text() + "\n".join(sink.texts)
    assert "migration_failed" in written or "stream_failed" in written, "the worker died under a request"
    assert "POST /v1/completions" in written and f"text_completion {MODEL}" in written
    assert [(mark, line) for mark in MARKS.values() for line in written.splitlines() if mark in line] == []


async def _err(http: httpx.AsyncClient) -> None:
    """Make each kind of mistake, and be answered normally once."""
    assert (await http.post("/v1/completions", json={**ASK, "max_tokens": 2})).status_code == 200
    for path, body in (
        ("/v1/completions", {**ASK, "model": MARKS["model"]}),
        (f"{RUN}/@cf/{MARKS['model']}", {"prompt": MARKS["prompt"]}),
        ("/v1/completions", {**ASK, MARKS["header"]: MARKS["prompt"]}),
        ("/v1/completions", {**ASK, "prompt": MARKS["prompt"] * 3000}),
        ("/v1/completions", {**ASK, "prompt_cache_key": MARKS["salt"], "max_tokens": MARKS["prompt"]}),
        ("/v1/completions", {**ASK, "guided_regex": f"({MARKS['grammar']}"}),
        (f"{RUN}/{MODEL}", {"prompt": MARKS["prompt"], "response_format": {"type": MARKS["grammar"]}}),
        (f"{RUN}/{MODEL}", {"prompt": MARKS["prompt"], "tools": [{"name": MARKS["tool"], "parameters": "x"}]}),
    ):
        assert (await http.post(path, json=body)).status_code in (400, 404)
    assert (await http.post("/v1/completions", content=f'{{"prompt": "{MARKS["prompt"]}'.encode())).status_code == 400
    assert (await http.get(f"/{MARKS['header']}")).status_code == 404
