"""A fleet of real processes, traffic, and a real Prometheus that watches both."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from control_plane.admission.budgets import DEFAULT_BUDGETS
from tandem_runtime import metrics
from tests.alerts.prometheus import Prometheus
from tests.system.conftest import SMALL
from tests.system.fleet import START_SECONDS, Fleet, Service, until
from tests.system.streams import client
from tests.tandem_runtime.test_memory import stub_folder

CERTIFICATE_SECONDS = 60.0
"""Renewed after half of them; the short pace's alert is at 40 s left."""
WORKERS = ("prefill-0", "decode-0", "decode-1")
_LEASE = ("--lease-seconds", "2")
_NARROW = ("--max-num-seqs", "4", "--max-num-waiting", "4")
"""Few requests fill a decode worker, and then the gateway's queue."""


@dataclass(frozen=True)
class Scene:
    """What a fault is injected into, and where its alert is seen."""

    fleet: Fleet
    prometheus: Prometheus
    http: httpx.AsyncClient
    statuses: Counter[int] = field(default_factory=Counter)
    """How often each status was answered so far."""

    def services(self, *names: str) -> list[Service]:
        return [self.fleet.services[name] for name in names]

    async def has_streams(self, name: str, seconds: float = 30.0) -> None:
        """Wait until this decode worker writes answers."""
        worker = self.fleet.worker(name)
        assert worker is not None, f"{name} is not registered"

        async def is_writing() -> bool:
            rows = (await self.http.get("/v1/requests?state=running")).json()["data"]
            return any(row["decode"] == worker.info.worker_id and row["completion_tokens"] > 0 for row in rows)

        await until(is_writing, seconds, lambda: f"{name} writes nothing; answers so far: {self.statuses}")

    def start_worker(self, name: str) -> None:
        """Start a worker by its name. `decode-1` has two GPUs of a stub of NVML, with an XID error and ECC errors."""
        role = name.partition("-")[0]
        flags = [*SMALL, *_LEASE, *(_NARROW if role == "decode" else ())]
        env = {}
        if name == "decode-0":  # shows its certificate to whoever reads its metrics
            flags += ["--metrics-listen", "0.0.0.0:0"]
        if name == "decode-1":
            stub = {"NVML_STUB_XIDS": "0:79", "NVML_STUB_OWN_PID": "self"}
            env = {"LD_LIBRARY_PATH": str(stub_folder()), **stub}
        self.fleet.start(role, name, *flags, env=env)

    @asynccontextmanager
    async def traffic(self, num_clients: int = 3, max_tokens: int = 4) -> AsyncIterator[None]:
        """Send requests all the time, a few at once. Their errors are what alerts are about."""
        clients = [asyncio.create_task(self._ask_forever(number, max_tokens)) for number in range(num_clients)]
        try:
            yield
        finally:
            for each in clients:
                each.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _ask_forever(self, number: int, max_tokens: int) -> None:
        for turn in range(1_000_000):
            await self.ask(f"{number} {turn}: What is a KV cache?", max_tokens, ignore_eos=True)

    async def ask(self, prompt: str, max_tokens: int, **options: Any) -> int:
        """Send one request; return the status of its answer."""
        message = {"role": "user", "content": prompt}
        body = {"model": "@tandem/demo", "messages": [message], "max_tokens": max_tokens, **options}
        status = (await self.http.post("/v1/chat/completions", json=body)).status_code
        self.statuses[status] += 1
        return status


@asynccontextmanager
async def open_scene(folder: Path) -> AsyncIterator[Scene]:
    """Start the fleet and Prometheus; both have ended after the block."""
    metrics.configure("control-plane", None)
    control: dict[str, Any] = {
        "audit_seconds": 0.3,
        "audit_grace_seconds": 1.0,
        "suspect_seconds": 2.0,
        "gone_seconds": 3.0,
    }
    control |= {"max_waiting": 8, "budgets": DEFAULT_BUDGETS}
    try:
        fleet = Fleet(folder, certificates=True, certificate_seconds=CERTIFICATE_SECONDS, **control)
        async with fleet, client(fleet.base_url) as http:
            bundle = folder / "state" / "certificates" / "gateway" / "current" / "bundle.pem"
            prometheus = Prometheus(folder / "prometheus", [fleet.gateway.http_address], ca_file=bundle)
            fleet.start("kv", "kv-0", *_LEASE)
            scene = Scene(fleet, prometheus, http)
            for name in WORKERS:
                scene.start_worker(name)
            # Prometheus looks at what it has discovered every five seconds: it begins while the models are loaded.
            await until(lambda: all(fleet.worker(name) for name in fleet.services), START_SECONDS)
            async with prometheus:
                await fleet.ready()
                yield scene
    finally:
        metrics.shutdown()


@asynccontextmanager
async def stopped(services: Sequence[Service]) -> AsyncIterator[None]:
    """Let processes stand still inside the block."""
    for service in services:
        service.kill(signal.SIGSTOP)
    try:
        yield
    finally:
        for service in services:
            with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
                service.kill(signal.SIGCONT)


@asynccontextmanager
async def stuttering(services: Sequence[Service], seconds: float, pause: float) -> AsyncIterator[None]:
    """Let processes stand still for `seconds`, again and again, with a pause between."""

    async def stutter() -> None:
        while True:
            async with stopped(services):
                await asyncio.sleep(seconds)
            await asyncio.sleep(pause)

    task = asyncio.create_task(stutter())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
