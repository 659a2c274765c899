"""A second gateway of the fleet, as a process of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from control_plane.settings import ControlPlaneSettings
from tests.chaos import embeddings
from tests.chaos.http_gateway import Conditions, HttpGateway, http_client
from tests.chaos.priorities import raise_priority
from tests.chaos.surroundings import SECOND_GATEWAY
from tests.ports import free_ports
from tests.system.fleet import START_SECONDS, until

_OWN = ("listen", "grpc_listen", "enrolment_listen")
_READY = ("/readyz", f"/readyz?model={embeddings.MODEL_ID}")
"""Without a model it is ready once any model is, which says nothing of the other one."""
_ENDED_SECONDS = 30.0
_TRY_AGAIN_SECONDS = 0.5


class SecondGateway(HttpGateway):
    """Shares the first one's state directory, so secret and database too, and has all its settings but the addresses.

    A supervisor's work is done here as well: a gateway that cannot start, since the disk is full, is started again.
    """

    def __init__(self, folder: Path, grpc_address: str, conditions: Conditions) -> None:
        http_port, enrolment_port = free_ports(2)
        addresses = (f"127.0.0.1:{http_port}", grpc_address, f"127.0.0.1:{enrolment_port}")
        self._addresses = dict(zip(_OWN, addresses, strict=True))
        super().__init__(SECOND_GATEWAY, http_client(f"http://{addresses[0]}"), conditions)
        self.log = folder / f"{SECOND_GATEWAY}.log"
        self.is_up = False
        """Whether it was ready after its last start, and nothing has ended it since."""
        self._killed: set[int] = set()
        self._drained: set[int] = set()
        self._command: list[str] = []
        self._environment: Mapping[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._ready_at = math.inf
        """Of its last start; until then it knows no worker, and a load balancer sends nothing."""

    @property
    def process(self) -> psutil.Process:
        assert self._process is not None, "started before"
        return psutil.Process(self._process.pid)

    def start(self, settings: ControlPlaneSettings, environment: Mapping[str, str], *, plaintext: bool) -> None:
        """Start it with the settings of the first one; `ready` waits for it."""
        flags = [f"{flag}={value}" for flag, value in _flags(settings, self._addresses).items()]
        plain = ["--insecure-plaintext"] if plaintext else []
        few = ("--text-processes", "1")  # it starts often, and no body is long
        self._command = [sys.executable, "-m", "tests.chaos.launch", "control_plane", *flags, *few, *plain]
        self._environment = environment
        self._spawn()

    async def ready(self) -> None:
        """Wait until it answers requests."""

        async def is_ready() -> bool:
            self._start_again_if_ended()
            with suppress(httpx.TransportError):
                return all([(await self.http.get(path)).status_code == 200 for path in _READY])
            return False

        await until(is_ready, START_SECONDS, lambda: f"{self.name} is not ready:\n{self.tail()}")
        raise_priority(self.process)
        self.is_up, self._ready_at = True, time.monotonic()

    async def kill(self) -> None:
        """End it with -9."""
        self._killed.add(self.life)
        self.is_up = False
        self.process.kill()
        await self._ended(_ENDED_SECONDS)

    async def drain(self, seconds: float) -> None:
        """Let it end by itself. Raises AssertionError if that takes longer, or fails."""
        self._drained.add(self.life)
        self.is_up = False
        self.process.terminate()
        code = await self._ended(seconds)
        assert code == 0, f"{self.name} drained and ended with {code}:\n{self.tail()}"

    def start_again(self) -> None:
        """Start its next life."""
        self.life += 1
        self._spawn()

    async def close(self) -> None:
        """End it, as a supervisor does at the end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGTERM)
            await self._ended(_ENDED_SECONDS)
        await self.http.aclose()

    def may_refuse(self, life: int, since: float, status: int, text: str) -> bool:
        is_ending = life in self._drained and "drain" in text
        is_starting = since < self._ready_at and "here or to another gateway" in text
        return (status == 503 and (is_ending or is_starting)) or super().may_refuse(life, since, status, text)

    def may_lose(self, life: int, *, has_head: bool) -> bool:
        """A killed gateway breaks its streams; one that drains closes connections on which no answer has begun."""
        if has_head:
            return life in self._killed
        return life in self._killed | self._drained or life != self.life or not self.is_up

    def tail(self, num_lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def _spawn(self) -> None:
        self._started_at, self._ready_at = time.monotonic(), math.inf
        with self.log.open("ab") as out:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TANDEM_LOG_JSON": "false", **self._environment}
            self._process = subprocess.Popen(self._command, stdout=out, stderr=subprocess.STDOUT, env=environment)

    def _start_again_if_ended(self) -> None:
        assert self._process is not None, "started before"
        if (code := self._process.poll()) is not None:
            assert self._conditions.was_disk_broken(self._started_at), (
                f"{self.name} ended by itself with {code}:\n{self.tail()}"
            )
            self._spawn()

    async def _ended(self, seconds: float) -> int:
        assert self._process is not None, "started before"
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._process.wait), seconds)
        except TimeoutError:
            self._process.kill()
            raise AssertionError(f"{self.name} did not end in {seconds:g} s:\n{self.tail()}") from None


def _flags(settings: ControlPlaneSettings, addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that are not the defaults, as flags."""
    changed: dict[str, Any] = {
        field.name: value
        for field in dataclasses.fields(settings)
        if (value := getattr(settings, field.name)) != field.default
    }
    return {f"--{name.replace('_', '-')}": _text(value) for name, value in {**changed, **addresses}.items()}


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
