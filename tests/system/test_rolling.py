"""`tandem up --replace`: all workers are replaced under streams, and a roll that fails is taken back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import free_ports
from tests.system.fleet import until
from tests.system.steady_streams import SteadyStreams

_ROOT = Path(__file__).resolve().parents[2]
_PROMPTS = [f"{number} ways to explain a KV cache. " * 6 for number in range(3)]
_NUM_TOKENS = 64


class _Up:
    """A running `tandem up` of the built-in model, and its commands."""

    def __init__(self, folder: Path) -> None:
        self.port, grpc_port, _ = free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self.output = folder / "up.log"
        self._folder = folder
        self._flags = ("--port", str(self.port))
        self._grpc = ("--grpc-port", str(grpc_port), "--insecure-plaintext")
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(_ROOT), str(_ROOT / "protos" / "gen"))),
            "TANDEM_STATE_DIR": str(folder / "state"),
            "TANDEM_RUNTIME_DIR": str(folder / "run"),
            "TANDEM_PREFILL_NUM_KV_BLOCKS": "256",
            "TANDEM_DECODE_NUM_KV_BLOCKS": "256",
            "NO_COLOR": "1",
        }
        (folder / "run").mkdir(mode=0o700)

    def start(self) -> subprocess.Popen[bytes]:
        with self.output.open("wb") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "tandem_client.cli", "up", *self._flags, *self._grpc],
                env=self.environment,
                cwd=self._folder,
                stdout=out,
                stderr=out,
            )

    async def replace(self, *flags: str) -> tuple[int, str]:
        """Run `tandem up --replace` to its end; return its exit code and what it printed."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tandem_client.cli", "up", "--replace", *self._flags, *flags),
            env=self.environment,
            cwd=self._folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 150)
        assert process.returncode is not None
        return process.returncode, output.decode()

    def describe(self) -> str:
        logs = sorted((self._folder / "state" / "logs").glob("*/*.log"))
        return "\n\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in [self.output, *logs])


@asynccontextmanager
async def _tandem_up(folder: Path) -> AsyncIterator[_Up]:
    up = _Up(folder)
    process = up.start()
    try:

        def is_ready() -> bool:
            assert process.poll() is None, up.describe()
            return "Tandem is ready" in up.output.read_text()

        await until(is_ready, 120, up.describe)
        yield up
    finally:
        process.send_signal(signal.SIGINT)
        try:
            await asyncio.to_thread(process.wait, 40)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


async def _workers(http: httpx.AsyncClient) -> dict[str, str]:
    rows: list[dict[str, Any]] = (await http.get("/v1/workers")).json()["data"]
    return {row["name"]: row["state"] for row in rows if row["role"] != "kv"}


async def _kinds(http: httpx.AsyncClient) -> list[str]:
    events = (await http.get("/v1/events", params={"limit": 1000})).json()["data"]
    return [event["kind"] for event in events if event["kind"].startswith("roll_")]


@pytest.mark.timeout(400)
async def test_workers_are_replaced_one_by_one_and_a_roll_that_fails_is_taken_back(tmp_path: Path) -> None:
    async with _tandem_up(tmp_path) as up, httpx.AsyncClient(base_url=up.url, timeout=60, trust_env=False) as http:
        streams = SteadyStreams(http, up.url, _PROMPTS, _NUM_TOKENS)
        await streams.start()
        try:
            # 1. Both workers are replaced, decode first, while streams run.
            code, printed = await up.replace("--drain-seconds", "20", "--start-seconds", "90")
            assert code == 0, printed + up.describe()
            assert streams.failures == []
            assert await _workers(http) == {"prefill-0-v2": "ready", "decode-0-v2": "ready"}
            assert "decode-0-v2  proven" in printed
            assert printed.index("prefill-0-v2") > printed.index("decode-0  stopped")

            # 2. The second of two steps fails: the first one is taken back, too.
            up.environment["TANDEM_PREFILL_NUM_KV_BLOCKS"] = "no number"
            code, printed = await up.replace("--drain-seconds", "20", "--start-seconds", "90")
            assert code == 1, printed
            assert "Taken back: prefill-0-v3 ended with exit code 2" in printed
            assert await _workers(http) == {"prefill-0-v2": "ready", "decode-0-v4": "ready"}, printed

            expected = ["roll_started", "roll_step", "roll_step", "roll_finished"]
            expected += ["roll_started", "roll_step", "roll_rolled_back"]

            async def are_kept() -> bool:
                return await _kinds(http) == expected

            await until(are_kept, 10, up.describe)
        finally:
            await streams.stop()
        assert streams.failures == [], up.describe()
        assert streams.num_answered > 0
