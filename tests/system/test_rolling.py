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


class _Streams:
    """Clients that stream the same greedy prompts again and again."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.expected: dict[str, str] = {}
        self.num_answered = 0
        self.failures: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for prompt in _PROMPTS:
            self.expected[prompt] = await self._answer(prompt)
        self._tasks = [asyncio.create_task(self._ask(prompt)) for prompt in _PROMPTS]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, prompt: str) -> None:
        while True:
            try:
                text = await self._answer(prompt)
            except (AssertionError, httpx.HTTPError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                return
            if text != self.expected[prompt]:
                self.failures.append(f"{text!r} instead of {self.expected[prompt]!r}")
            self.num_answered += 1

    async def _answer(self, prompt: str) -> str:
        text, num_tokens = "", 0
        body = {"model": "@tandem/demo", "prompt": prompt, "max_tokens": _NUM_TOKENS, "ignore_eos": True}
        asked = {**body, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", "/v1/completions", json=asked) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    assert num_tokens == _NUM_TOKENS
                    return text
                if line.startswith("data: "):
                    event = httpx.Response(200, text=line.removeprefix("data: ")).json()
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
                    num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        raise AssertionError("a stream ended without [DONE]")


async def _workers(http: httpx.AsyncClient) -> dict[str, str]:
    rows: list[dict[str, Any]] = (await http.get("/v1/workers")).json()["data"]
    return {row["name"]: row["state"] for row in rows if row["role"] != "kv"}


async def _kinds(http: httpx.AsyncClient) -> list[str]:
    events = (await http.get("/v1/events", params={"limit": 1000})).json()["data"]
    return [event["kind"] for event in events if event["kind"].startswith("roll_")]


@pytest.mark.timeout(400)
async def test_workers_are_replaced_one_by_one_and_a_roll_that_fails_is_taken_back(tmp_path: Path) -> None:
    async with _tandem_up(tmp_path) as up, httpx.AsyncClient(base_url=up.url, timeout=60, trust_env=False) as http:
        streams = _Streams(http)
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
