"""Starts a gateway, and services beside it one by one, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.lib.later_report import LaterReport
from benchmarks.lib.served import clean_environment
from tandem_client.cli.parent_death import die_with_parent
from tandem_client.cli.supervisor import last_lines
from tests.ports import free_ports

_MODULES = {
    "gateway": "control_plane",
    "prefill": "prefill_svc",
    "decode": "decode_svc",
    "encode": "encode_svc",
    "kv": "kv_transfer_svc",
}
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.05
_STALL_SECONDS = 0.02

Row = dict[str, Any]
"""A worker or KV service, as `GET /v1/workers` describes it."""


@dataclass(eq=False)
class Service:
    """One process and its log, of JSON lines."""

    role: str
    name: str
    process: asyncio.subprocess.Process
    log: Path

    goes_first: bool = False
    """The kernel runs it before all others: the clock shows its own stalls."""
    num_forgotten_bytes: int = 0
    """Of the log: what is written there is of no interest any more."""

    def forget_stalls(self) -> None:
        self.num_forgotten_bytes = self.log.stat().st_size

    def longest_stall(self) -> Stall:
        """Return the stall that took longest: by the clock if the service goes first, else of computing."""
        return longest_stall(self.log, self.num_forgotten_bytes, by_clock=self.goes_first)


class Stall(NamedTuple):
    """A time over 20 ms in which an event loop did not run; what it computed meanwhile, at most; and where."""

    cpu_seconds: float = 0.0
    seconds: float = 0.0
    where: str = ""


def longest_stall(log: Path, first_byte: int, *, by_clock: bool = False) -> Stall:
    """Return the stall with the most computing, or the longest by the clock."""
    longest = Stall()
    for line in log.read_bytes()[first_byte:].splitlines():
        if b'"loop_stalled"' in line:
            stall = json.loads(line)
            found = Stall(stall["cpu_seconds"], stall["seconds"], " < ".join(stall["frames"][:3]))
            longest = max(longest, found, key=lambda each: each.seconds if by_clock else each.cpu_seconds)
    return longest


def _first(cores: Sequence[int]) -> list[str]:
    """Return what is put before a command that the kernel shall run before all others, on `cores`."""
    taskset, chrt = (shutil.which(name) or name for name in ("taskset", "chrt"))
    return [taskset, "-c", ",".join(map(str, cores)), chrt, "--fifo", "10"]


class Services:
    """`async with Services(folder) as services:` runs a gateway; `start` and `stop` the others."""

    def __init__(self, folder: Path, *, first_role: str = "", cores: Sequence[int] = ()) -> None:
        """`first_role`: run services of this role on `cores`, with real-time priority; needs the right to."""
        http_port, grpc_port, enrolment_port = free_ports(3)
        self._folder = folder
        self._first_role = first_role
        self._first = _first(cores)
        self._control = f"127.0.0.1:{grpc_port}"
        self._gateway_flags = ["--listen", f"127.0.0.1:{http_port}", "--grpc-listen", self._control]
        self._gateway_flags += ["--enrolment-listen", f"127.0.0.1:{enrolment_port}", "--local-prefill", "never"]
        self._gateway_flags += ["--probe-interval-seconds", "86400", "--probe-valid-seconds", "172800"]
        self._running: dict[str, Service] = {}
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", trust_env=False, timeout=600.0)

    async def __aenter__(self) -> Services:
        await self._spawn("gateway", "gateway", self._gateway_flags)
        await self._until(self._answers, "the gateway answers")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        for service in reversed(self.running):
            await self.stop(service)

    @property
    def running(self) -> list[Service]:
        """All services, the gateway included."""
        return [*self._running.values()]

    async def start(self, role: str, name: str, *flags: str) -> Service:
        """Start a service, and return once it may be given requests."""
        service = await self._spawn(role, name, ["--control", self._control, "--worker-id", name, *flags])
        await self._until(lambda: self._is_ready(name), f"{name} is ready")
        return service

    async def stop(self, service: Service) -> None:
        """End a service by SIGTERM, as an operator does, and wait until the gateway has forgotten it."""
        del self._running[service.name]
        if service.process.returncode is None:
            service.process.terminate()
        try:
            await asyncio.wait_for(service.process.wait(), _STOP_SECONDS)
        except TimeoutError:
            service.process.kill()
            await service.process.wait()
            raise RuntimeError(f"{service.name} did not end:\n{_tail(service)}") from None
        if not self.http.is_closed:
            await self._until(lambda: self._is_gone(service.name), f"{service.name} is gone")

    async def row(self, name: str) -> Row:
        """Return what a service has reported of the time after this call."""
        report = LaterReport()

        async def later() -> Row | None:
            found = (await self._rows()).get(name)
            return found if found is not None and report.is_in(found) else None

        found: Row = await self._until(later, f"{name} reports")
        return found

    async def until(self, name: str, condition: Callable[[Row], bool], what: str) -> None:
        """Wait until what a service reports fulfils a condition."""

        async def fulfilled() -> bool:
            found = (await self._rows()).get(name)
            return found is not None and condition(found)

        await self._until(fulfilled, what)

    async def model(self) -> str:
        """Return the name of the model that is served, once one is."""

        async def named() -> str:
            models = (await self.http.get("/v1/models")).json()["data"]
            return models[0]["id"] if models else ""

        return str(await self._until(named, "a model is served"))

    async def _spawn(self, role: str, name: str, flags: list[str]) -> Service:
        log = self._folder / f"{name}.log"
        goes_first = role == self._first_role
        command = [
            *(self._first if goes_first else []),
            sys.executable,
            "-m",
            _MODULES[role],
            "--loop-stall-seconds",
            str(_STALL_SECONDS),
            "--log-json",
            "true",
        ]
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *die_with_parent([*command, *flags]),
                env=clean_environment(self._folder / "state", {"OMP_NUM_THREADS": "1"}),
                cwd=self._folder,  # no tandem.toml of whoever measures is found here
                stdout=out,
                stderr=out,
            )
        service = self._running[name] = Service(role, name, process, log, goes_first)
        return service

    async def _rows(self) -> dict[str, Row]:
        return {row["name"]: row for row in (await self.http.get("/v1/workers")).json()["data"]}

    async def _answers(self) -> bool:
        try:
            return (await self.http.get("/healthz")).is_success
        except httpx.TransportError:
            return False  # nobody listens yet

    async def _is_ready(self, name: str) -> bool:
        found = (await self._rows()).get(name)
        return found is not None and found["state"] == "ready" and not found["suspected"]

    async def _is_gone(self, name: str) -> bool:
        return name not in await self._rows()

    async def _until(self, condition: Callable[[], Any], what: str) -> Any:
        """Return what the condition returns once that is true; raises RuntimeError if a service ends meanwhile."""
        deadline = time.monotonic() + _START_SECONDS
        while not (found := await condition()):
            for service in self.running:
                if service.process.returncode is not None:
                    raise RuntimeError(f"{service.name} ended:\n{_tail(service)}")
            if time.monotonic() > deadline:
                tails = "\n\n".join(f"--- {each.name}\n{_tail(each)}" for each in self.running)
                raise RuntimeError(f"waited {_START_SECONDS:g} s in vain until {what}\n{tails}")
            await asyncio.sleep(_POLL_SECONDS)
        return found


def _tail(service: Service) -> str:
    return "\n".join(last_lines(service.log, 12))
