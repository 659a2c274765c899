"""Starts a Tandem by hand, with the commands of docs/operate/machines.md: an engine on each of two cores."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from benchmarks.lib.served import clean_environment, models_are_ready
from tandem_client.cli.fleet import parse_fleet
from tandem_client.cli.parent_death import die_with_parent
from tandem_client.cli.supervisor import last_lines
from tests.ports import free_ports

_START_SECONDS = 240.0
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.2
_ROLES = frozenset(("prefill", "decode", "kv"))


class ByHand:
    """Gateway, KV service and two workers on free ports. `async with` starts them, and stops them at the end."""

    def __init__(self, folder: Path, model: str, cores: Sequence[int], environment: Mapping[str, str]) -> None:
        http_port, grpc_port, enrolment_port = free_ports(3)
        self.base_url = f"http://127.0.0.1:{http_port}"
        self._folder = folder
        self._environment = clean_environment(
            folder / "state", {"TANDEM_CONTROL_ENROLMENT_LISTEN": f"127.0.0.1:{enrolment_port}", **environment}
        )
        self._beside = beside_decode(cores)
        self._commands = commands(http_port, grpc_port, model, cores)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.model = ""
        """What the services call the model; known once entered."""

    async def __aenter__(self) -> ByHand:
        self._folder.mkdir()
        for service, flags in self._commands.items():
            self._start(service, flags)
        try:
            async with asyncio.timeout(_START_SECONDS):
                self.model = await self._wait_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                await asyncio.to_thread(process.wait, _STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)

    def _start(self, service: str, flags: Sequence[str]) -> None:
        command = die_with_parent([*self._beside, sys.executable, "-m", service, *flags])
        with self._log(service).open("wb") as log:
            # A session for each, as in a terminal of its own: Linux divides the processor between sessions first.
            self._processes[service] = subprocess.Popen(
                command, env=self._environment, cwd=self._folder, stdout=log, stderr=log, start_new_session=True
            )

    def _log(self, service: str) -> Path:
        return self._folder / f"{service}.log"

    async def _wait_ready(self) -> str:
        async with httpx.AsyncClient(base_url=self.base_url, trust_env=False, timeout=5.0) as client:
            while True:
                for service, process in self._processes.items():
                    if process.poll() is not None:
                        tail = "\n".join(last_lines(self._log(service), 30))
                        raise RuntimeError(f"{service} ended with exit code {process.returncode}:\n{tail}")
                try:
                    if await _is_ready(client):
                        model: str = (await client.get("/v1/models")).json()["data"][0]["id"]
                        return model
                except httpx.TransportError:
                    pass  # nobody listens yet
                await asyncio.sleep(_POLL_SECONDS)


def beside_decode(cores: Sequence[int]) -> list[str]:
    """Return what starts a command on the core that does not decode; decode's engine takes its own core then."""
    return [shutil.which("taskset") or "taskset", "-c", str(cores[0])]


def commands(http_port: int, grpc_port: int, model: str, cores: Sequence[int]) -> dict[str, list[str]]:
    """Return the flags of each service, in the order of the page."""
    control = ["--control", f"127.0.0.1:{grpc_port}"]
    return {
        "control_plane": ["--listen", f"127.0.0.1:{http_port}", "--grpc-listen", f"127.0.0.1:{grpc_port}"],
        "kv_transfer_svc": control,
        "prefill_svc": [*control, "--model", model, "--cpus", str(cores[0])],
        "decode_svc": [*control, "--model", model, "--cpus", str(cores[1])],
    }


async def _is_ready(client: httpx.AsyncClient) -> bool:
    fleet = parse_fleet((await client.get("/v1/workers")).json())
    ready = {member.role for member in fleet if member.state == "ready" and not member.suspected}
    return ready >= _ROLES and await models_are_ready(client)
