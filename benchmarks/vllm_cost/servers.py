"""Starts both servers, and pins each engine to one core and everything else to another."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.lib.served import Served
from tandem_client.cli.parent_death import die_with_parent
from tandem_client.cli.supervisor import last_lines
from tests.ports import free_ports

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 512
KV_BYTES = 512 << 20
_START_SECONDS = 240.0
_END_SECONDS = 20.0
_ENGINE_NAMES = ("tandem_vllm", "VLLM::Worker")
"""In the command line of the process that computes. `vllm serve` has its scheduler in another one, VLLM::EngineCore."""


@dataclass(frozen=True)
class Server:
    """An HTTP server with one engine process behind it."""

    base_url: str
    model: str
    pid: int


@asynccontextmanager
async def tandem(python: str, model: Path, folder: Path) -> AsyncIterator[Server]:
    """Start `tandem up` with a decode worker that has vLLM inside."""
    flags = ("--model", str(model), "--prefill", "0")
    engine = {
        "TANDEM_CONTROL_BUDGETS": "*=0/0",  # vllm serve has none: 32 streams of a slow model are beyond the defaults
        "TANDEM_VLLM_PYTHON": python,
        "TANDEM_DECODE_ENGINE": "vllm",
        "TANDEM_DECODE_DTYPE": "float32",
        "TANDEM_DECODE_NUM_THREADS": "1",
        "TANDEM_DECODE_MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        "TANDEM_DECODE_MAX_NUM_SEQS": str(MAX_NUM_SEQS),
        "TANDEM_DECODE_MAX_NUM_BATCHED_TOKENS": str(MAX_NUM_BATCHED_TOKENS),
        "TANDEM_DECODE_KV_MEMORY_BYTES": str(KV_BYTES),
    }
    async with Served(folder / "tandem", flags, engine, {"decode"}) as served:
        yield Server(served.base_url, served.model, served.pid)


@asynccontextmanager
async def vllm_alone(python: str, model: Path, folder: Path) -> AsyncIterator[Server]:
    """Start `vllm serve` with the settings that Tandem gives its engine; all others are vLLM's defaults."""
    (port,) = free_ports(1)
    flags: Mapping[str, object] = {
        "model": model,
        "served-model-name": model.name,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "block-size": 32,
        "max-model-len": MAX_MODEL_LEN + 1,
        "max-num-seqs": MAX_NUM_SEQS,
        "max-num-batched-tokens": MAX_NUM_BATCHED_TOKENS,
        "kv-cache-memory-bytes": KV_BYTES,
        "generation-config": "vllm",
    }
    command = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [each for name, value in flags.items() for each in (f"--{name}", str(value))]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "PYTHON"))}
    ours = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    log = folder / "vllm-serve.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *die_with_parent(command), env={**kept, **ours, "VLLM_LOGGING_LEVEL": "WARNING"}, stdout=out, stderr=out
        )
    try:
        base_url = f"http://127.0.0.1:{port}"
        await asyncio.wait_for(_answers(process, base_url, log), _START_SECONDS)
        yield Server(base_url, model.name, process.pid)
    finally:
        await _ended(process)


def pin(server: Server, engine_core: int, other_core: int) -> int:
    """Pin all threads of a server; return the pid of its engine. The engine is the process that computes."""
    root = psutil.Process(server.pid)
    processes = [root, *root.children(recursive=True)]
    engines = [each.pid for each in processes if any(name in " ".join(each.cmdline()) for name in _ENGINE_NAMES)]
    assert len(engines) == 1, f"engine processes of {server.base_url}: {engines}"
    for process in processes:
        pin_threads(process, engine_core if process.pid in engines else other_core)
    return engines[0]


def pin_threads(process: psutil.Process, core: int) -> None:
    """Pin all threads of a process, and those that they will start."""
    for thread in process.threads():
        with suppress(ProcessLookupError):  # a thread that has ended meanwhile
            os.sched_setaffinity(thread.id, {core})


async def _ended(process: asyncio.subprocess.Process) -> None:
    """End a server and its engine, which outlives it for a moment: its CPU time would count as that of others."""
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, _END_SECONDS)
        for each in alive:
            each.kill()
    await process.wait()


def _tail(log: Path) -> str:
    return "\n".join(last_lines(log, 30))


async def _answers(process: asyncio.subprocess.Process, base_url: str, log: Path) -> None:
    async with httpx.AsyncClient(base_url=base_url, trust_env=False, timeout=5.0) as client:
        while process.returncode is None:
            with suppress(httpx.TransportError):
                if (await client.get("/health")).is_success:
                    return
            await asyncio.sleep(0.5)
    raise RuntimeError(f"vllm serve ended with {process.returncode}:\n{_tail(log)}")
