"""Starts the systems that serve the load, each on the same two cores, and sends them requests."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.isolation_itl.load import Answers
from benchmarks.lib import random_model
from benchmarks.lib.arrangements import one_core_each
from benchmarks.lib.engine_models import SHAPES, ShapeFacts, made
from benchmarks.lib.served import ROOT, Served
from benchmarks.lib.streaming import new_client
from benchmarks.peers import places
from tandem_client.cli.parent_death import die_with_parent
from tandem_client.cli.supervisor import last_lines
from tests.ports import free_port

_NUM_CONTROL_TOKENS = 2
_START_SECONDS = 120.0
_END_SECONDS = 10.0
_POLL_SECONDS = 0.1
_MAX_NUM_SEQS = 12
_STORE_BYTES = 512 << 20


@dataclass(frozen=True)
class World:
    """What all systems have in common."""

    shape: str
    cpus: tuple[int, ...]
    max_context: int
    folder: Path

    @property
    def facts(self) -> ShapeFacts:
        return ShapeFacts(SHAPES[self.shape])

    @property
    def kv_bytes(self) -> int:
        """Room for the streams, and for as many prompts again."""
        return (_MAX_NUM_SEQS * self.max_context + 64) * self.facts.kv_bytes_per_token

    def place(self, name: str) -> Path:
        """Return a folder that is not there yet."""
        taken = len(list(self.folder.glob(f"{name}-*")))
        return self.folder / f"{name}-{taken}"


Start = Callable[[World, int], AbstractAsyncContextManager[Answers]]


@dataclass(frozen=True)
class System:
    """One way to serve. `start(world, chunk)`; a chunk is the most tokens of one step."""

    name: str
    start: Start
    installed_as: str = ""
    has_chunks: bool = True

    @property
    def missing(self) -> str:
        if self.installed_as and not places.is_installed(self.installed_as):
            return f"not installed; `make peers` would (or: python -m benchmarks.peers.install {self.installed_as})"
        return ""


@dataclass
class TandemClient:
    """Asks over the Workers AI REST interface; a token of the prompt is a word of the made-up vocabulary."""

    http: httpx.AsyncClient
    model: str
    words: Sequence[str]
    account: str = "default"

    async def answer(self, prompt: list[int], num_tokens: int, times: list[float]) -> None:
        """Stream one greedy answer; raises RuntimeError where it is refused or breaks off."""
        text = "".join(f" {self.words[token - _NUM_CONTROL_TOKENS]}" for token in prompt)
        inputs = {"prompt": text, "raw": True, "stream": True, "temperature": 0}
        inputs |= {"max_tokens": num_tokens, "min_tokens": num_tokens}
        url = f"/client/v4/accounts/{self.account}/ai/run/{self.model}"
        await _stream(self.http, url, inputs, lambda event: bool(event.get("response")), num_tokens, times)


@dataclass
class CompletionClient:
    """Asks llama-server, or what speaks as it does."""

    http: httpx.AsyncClient
    more: dict[str, Any] = field(default_factory=dict)

    async def answer(self, prompt: list[int], num_tokens: int, times: list[float]) -> None:
        """Stream one greedy answer; raises RuntimeError where it is refused or breaks off."""
        inputs = {"prompt": prompt, "n_predict": num_tokens, "stream": True, **self.more}
        is_token = lambda event: bool(event.get("tokens")) and not event.get("stop")  # noqa: E731
        await _stream(self.http, "/completion", inputs, is_token, num_tokens, times)


async def _stream(
    http: httpx.AsyncClient,
    url: str,
    inputs: dict[str, Any],
    is_token: Callable[[dict[str, Any]], bool],
    num_tokens: int,
    times: list[float],
) -> None:
    try:
        async with http.stream("POST", url, json=inputs) as answer:
            if not answer.is_success:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')}")
            async for line in answer.aiter_lines():
                came = time.perf_counter()
                data = line.removeprefix("data: ")
                if data != line and data != "[DONE]" and is_token(json.loads(data)):
                    times.append(came)
    except httpx.TransportError as error:
        raise RuntimeError(f"{url} broke off behind {len(times)} tokens: {error!r}") from error
    if len(times) < num_tokens:
        raise RuntimeError(f"{url} answered {len(times)} of {num_tokens} tokens")


# ------------------------------------------------------------------------------------------------------- Tandem


@asynccontextmanager
async def disaggregated(world: World, chunk: int) -> AsyncIterator[Answers]:
    """One core for prefill, one for decode, KV through the KV service. The chunk is prefill's."""
    arrangement = one_core_each()[0]
    environment = {**arrangement.environment, "TANDEM_PREFILL_MAX_NUM_BATCHED_TOKENS": str(chunk)}
    async with _tandem(world, "disaggregated", (), environment, arrangement.roles) as client:
        yield client


@asynccontextmanager
async def aggregated(world: World, chunk: int) -> AsyncIterator[Answers]:
    """One worker with a thread on each core; prompts and answers share its steps."""
    environment = {
        "TANDEM_DECODE_CPUS": ",".join(map(str, world.cpus)),
        "TANDEM_DECODE_NUM_THREADS": str(len(world.cpus)),
        "TANDEM_DECODE_MAX_NUM_BATCHED_TOKENS": str(chunk),
        "TANDEM_DECODE_MAX_PREFILL_TOKENS_WITH_DECODES": str(chunk),
        "OMP_NUM_THREADS": str(len(world.cpus)),
    }
    async with _tandem(world, "aggregated", ("--prefill", "0"), environment, ("decode",)) as client:
        yield client


@asynccontextmanager
async def _tandem(
    world: World, name: str, flags: tuple[str, ...], environment: dict[str, str], roles: tuple[str, ...]
) -> AsyncIterator[Answers]:
    model = await asyncio.to_thread(made, world.shape, "fp32")
    common = {f"TANDEM_{role}_KV_MEMORY_BYTES": str(world.kv_bytes) for role in ("PREFILL", "DECODE")}
    common |= {f"TANDEM_{role}_MAX_NUM_SEQS": str(_MAX_NUM_SEQS) for role in ("PREFILL", "DECODE")}
    common |= {
        "TANDEM_KV_STORE_BYTES": str(_STORE_BYTES),
        "TANDEM_CONTROL_LOCAL_PREFILL": "never",
        "TANDEM_DECODE_SPECULATION": "off",
        "TANDEM_CONTROL_PROBE_INTERVAL_SECONDS": "86400",
        "TANDEM_CONTROL_PROBE_VALID_SECONDS": "172800",
    }
    served = Served(world.place(name), ("--model", str(model), *flags), {**common, **environment}, roles)
    async with served, new_client(served.base_url) as http:
        words = random_model.words(world.facts.shape["vocab_size"] - _NUM_CONTROL_TOKENS)
        yield TandemClient(http, served.model, words)


# -------------------------------------------------------------------------------------------------------- peers


@asynccontextmanager
async def llama_server(world: World, chunk: int) -> AsyncIterator[Answers]:
    """llama.cpp's own server: a slot per request, continuous batching, float32 cache, nothing cached."""
    model = await asyncio.to_thread(made, world.shape, "gguf_f32")
    port = free_port()
    threads, context = str(len(world.cpus)), str(_MAX_NUM_SEQS * world.max_context)
    command = [str(places.LLAMA_SERVER), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", threads, "--threads-batch", threads, "--threads-http", str(2 * _MAX_NUM_SEQS)]
    command += ["--parallel", str(_MAX_NUM_SEQS), "--ctx-size", context, "--no-kv-unified"]
    command += ["--batch-size", str(chunk), "--ubatch-size", str(min(chunk, 512)), "--flash-attn", "on"]
    command += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--no-warmup", "--no-webui", "--cache-ram", "0"]
    async with _peer(world, "llama_server", command, port) as http:
        yield CompletionClient(
            http, {"temperature": 0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True}
        )


@asynccontextmanager
async def openvino(world: World, chunk: int) -> AsyncIterator[Answers]:
    """OpenVINO GenAI's continuous batching behind a few lines of HTTP."""
    model = await asyncio.to_thread(made, world.shape, "openvino")
    port = free_port()
    command = [str(places.OPENVINO_PYTHON), "-m", "benchmarks.peers.openvino_server", str(model), "--port", str(port)]
    command += ["--threads", str(len(world.cpus)), "--chunk", str(chunk)]
    command += ["--cache-bytes", str(world.kv_bytes), "--max-num-seqs", str(_MAX_NUM_SEQS)]
    async with _peer(world, "openvino", command, port) as http:
        yield CompletionClient(http)


@asynccontextmanager
async def _peer(world: World, name: str, command: list[str], port: int) -> AsyncIterator[httpx.AsyncClient]:
    """Start a server on our cores, wait until it is healthy, and end it."""
    place = world.place(name)
    place.mkdir()
    log = place / "server.log"
    taskset = shutil.which("taskset")
    pinned = [taskset, "--cpu-list", ",".join(map(str, world.cpus))] if taskset else []
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TANDEM_", "OMP_", "LLAMA_"))}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *die_with_parent([*pinned, *command]),
            cwd=ROOT,
            env={**kept, "PYTHONPATH": str(ROOT)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        async with new_client(f"http://127.0.0.1:{port}") as http:
            http.headers["connection"] = "close"  # llama-server ends idle connections while they are taken up again
            await _until_healthy(http, process, log)
            yield http
    finally:
        await _end(process)


async def _until_healthy(http: httpx.AsyncClient, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(_START_SECONDS):
        while process.returncode is None:
            try:
                if (await http.get("/health")).is_success:
                    return
            except httpx.TransportError:
                pass  # nobody listens yet
            await asyncio.sleep(_POLL_SECONDS)
    raise RuntimeError("the server ended with {}:\n{}".format(process.returncode, "\n".join(last_lines(log, 15))))


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _END_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


DISAGGREGATED = System("disaggregated", disaggregated, has_chunks=False)
OTHERS = (
    System("aggregated", aggregated),
    System("llama_server", llama_server, "llama_cpp"),
    System("openvino", openvino, "openvino"),
)
