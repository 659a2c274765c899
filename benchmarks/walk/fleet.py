"""Starts the four services of a checkout under the tracer, and records what one request runs in each process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tandem_client.cli.parent_death import die_with_parent
from tests.ports import free_ports

_TRACER = Path(__file__).parent / "tracer"
_START_SECONDS = 240.0
_DUMP_SECONDS = 30.0
_POLL_SECONDS = 0.1
_QUIET_SECONDS = 2.5
"""Long enough for two heartbeats, so that an idle recording holds all that runs without requests."""
_BODY: dict[str, Any] = {"model": "@tandem/demo", "stream": True, "max_tokens": 24, "temperature": 0}


@dataclass(frozen=True)
class Recording:
    """The lines of the checkout that one process ran."""

    process: str
    lines: Mapping[str, frozenset[int]]
    """File, relative to the checkout -> line numbers."""


class TracedFleet:
    """One process of each service of the checkout `root`. `async with` starts them, and stops them at the end."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._folder = folder
        self._http_port, self._grpc_port = free_ports(2)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    async def __aenter__(self) -> TracedFleet:
        control = ("--control", f"127.0.0.1:{self._grpc_port}")
        model = (*control, "--model", "@tandem/demo")
        listen = ("--listen", f"127.0.0.1:{self._http_port}", "--grpc-listen", f"127.0.0.1:{self._grpc_port}")
        self._start("control_plane", *listen, "--local-prefill", "never")
        self._start("kv_transfer_svc", *control)
        self._start("prefill_svc", *model)
        self._start("decode_svc", *model)
        try:
            async with asyncio.timeout(_START_SECONDS), self._client() as client:
                await _until(lambda: self._is_ready(client))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            await asyncio.to_thread(process.wait)

    async def record(self, prompt: str | None) -> list[Recording]:
        """Return what each process runs for one streamed chat request, or for some idle seconds without a prompt."""
        for process in self._all():
            process.send_signal(signal.SIGUSR1)
        if prompt is None:
            await asyncio.sleep(_QUIET_SECONDS)
        else:
            await self.ask(prompt)
        return await self._dump()

    async def ask(self, prompt: str) -> None:
        """Stream one answer to its end; raises RuntimeError for anything else."""
        body = {**_BODY, "messages": [{"role": "user", "content": prompt}]}
        async with self._client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            text = "".join([line async for line in answer.aiter_lines()])
        if "data: [DONE]" not in text:
            raise RuntimeError(f"the answer did not end: {text[-500:]}")

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._http_port}", trust_env=False, timeout=120.0)

    async def _is_ready(self, client: httpx.AsyncClient) -> bool:
        for name, process in self._processes.items():
            if process.poll() is not None:
                log = (self._folder / f"{name}.log").read_text()[-2000:]
                raise RuntimeError(f"{name} ended with exit code {process.returncode}:\n{log}")
        try:
            return (await client.get("/readyz?model=demo")).is_success
        except httpx.TransportError:
            return False

    def _start(self, service: str, *flags: str) -> None:
        paths = (str(_TRACER), str(self._root), str(self._root / "protos" / "gen"))
        ours = {
            "PYTHONPATH": os.pathsep.join(paths),
            "TANDEM_WALK_ROOT": f"{self._root}{os.sep}",
            "TANDEM_WALK_OUT": str(self._folder),
            "TANDEM_STATE_DIR": str(self._folder / "state"),
            "TANDEM_RUNTIME_DIR": str(self._folder / "run"),
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "OTEL_"))}
        command: Sequence[str] = die_with_parent([sys.executable, "-m", service, *flags])
        with (self._folder / f"{service}.log").open("wb") as log:
            self._processes[service] = subprocess.Popen(
                command, env={**kept, **ours}, cwd=self._folder, stdout=log, stderr=log
            )

    def _all(self) -> list[psutil.Process]:
        """Return the services and their engines; a helper without the tracer would die of its signal."""
        found = []
        for process in self._processes.values():
            service = psutil.Process(process.pid)
            engines = [child for child in service.children(recursive=True) if "process" in " ".join(child.cmdline())]
            found += [service, *engines]
        return found

    async def _dump(self) -> list[Recording]:
        processes = self._all()
        before = set(self._folder.glob("*.json"))
        for process in processes:
            process.send_signal(signal.SIGUSR2)
        async with asyncio.timeout(_DUMP_SECONDS):
            await _until(lambda: _have(self._folder, len(before) + len(processes)))
        new = set(self._folder.glob("*.json")) - before
        names = {process.pid: name for name, process in self._processes.items()}
        parents = {process.pid: process.ppid() for process in processes}
        return [_recording(file, names, parents) for file in sorted(new)]


async def _have(folder: Path, number: int) -> bool:
    return len([name for name in os.listdir(folder) if name.endswith(".json")]) >= number  # noqa: PTH208


async def _until(is_true: Callable[[], Awaitable[bool]]) -> None:
    """Poll a condition; the caller sets the deadline."""
    while not await is_true():  # noqa: ASYNC110 - the condition is in other processes
        await asyncio.sleep(_POLL_SECONDS)


def _recording(file: Path, names: Mapping[int, str], parents: Mapping[int, int]) -> Recording:
    pid = int(file.stem.partition("-")[0])
    name = names.get(pid) or f"{names.get(parents[pid], '?')} engine"
    lines = json.loads(file.read_text())["lines"]
    return Recording(name, {each: frozenset(numbers) for each, numbers in lines.items()})
