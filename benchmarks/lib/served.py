"""Starts a whole Tandem for a measurement, and stops it afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path

import httpx

from tandem_client.cli.fleet import parse_fleet
from tandem_client.cli.parent_death import die_with_parent
from tandem_client.cli.supervisor import last_lines
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 240.0
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.2


class Served:
    """`tandem up` in a process of its own, on free ports, with a state folder of its own.

    `async with Served(folder, flags, env, roles) as served:` returns once a worker of every role is ready, each
    model is served, and `/readyz?model=` says yes of each. That alone is not enough: decode serves by itself before
    prefill has registered.
    """

    def __init__(
        self, folder: Path, flags: tuple[str, ...], environment: Mapping[str, str], roles: Collection[str]
    ) -> None:
        http_port, grpc_port, enrolment_port = free_ports(3)
        self.base_url = f"http://127.0.0.1:{http_port}"
        self._folder = folder
        self._roles = frozenset(roles)
        self._encoders = {Path(path).name for flag, path in pairwise(flags) if flag == "--embedding-model"}
        self._command = [sys.executable, "-m", "tandem_client.cli", "up", *flags]
        self._command += ["--port", str(http_port), "--grpc-port", str(grpc_port)]
        enrolment = {"TANDEM_CONTROL_ENROLMENT_LISTEN": f"127.0.0.1:{enrolment_port}"}
        self._environment = clean_environment(folder / "state", {**enrolment, **environment})
        self._process: asyncio.subprocess.Process | None = None

    async def replace(self, *flags: str, seconds: float, environment: Mapping[str, str]) -> tuple[int, str]:
        """Run `tandem up --replace` with these flags and variables; return its exit code and what it printed."""
        port = self.base_url.rpartition(":")[2]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tandem_client.cli", "up", "--replace", "--port", port, *flags),
            env={**self._environment, **environment},
            cwd=self._folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), seconds)
        except TimeoutError as error:
            process.terminate()
            await process.wait()
            raise RuntimeError(f"tandem up --replace did not end within {seconds:g} s:\n{self._tail()}") from error
        return process.returncode or 0, output.decode()

    @property
    def model(self) -> str:
        """What the services call the model; known once entered."""
        return self._model

    @property
    def pid(self) -> int:
        """The process of `tandem up`; known once entered."""
        assert self._process is not None, "started before"
        return self._process.pid

    async def __aenter__(self) -> Served:
        self._folder.mkdir()
        with self._log.open("wb") as log:
            # No tandem.toml of whoever measures is found in a folder of our own.
            self._process = await asyncio.create_subprocess_exec(
                *die_with_parent(self._command),
                env=self._environment,
                cwd=self._folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(_START_SECONDS):
                self._model = await self._wait_ready()
        except BaseException as error:
            await self._stop()
            if isinstance(error, TimeoutError):
                raise RuntimeError(f"tandem up was not ready in {_START_SECONDS:g} s:\n{self._tail()}") from error
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    @property
    def _log(self) -> Path:
        return self._folder / "tandem-up.log"

    async def _wait_ready(self) -> str:
        assert self._process is not None, "started before"
        async with httpx.AsyncClient(base_url=self.base_url, trust_env=False, timeout=5.0) as client:
            while self._process.returncode is None:
                try:
                    if await self._is_ready(client) and (model := await self._text_model(client)):
                        return model
                except httpx.TransportError:
                    pass  # nobody listens yet
                await asyncio.sleep(_POLL_SECONDS)
        raise RuntimeError(f"tandem up ended with exit code {self._process.returncode}:\n{self._tail()}")

    async def _is_ready(self, client: httpx.AsyncClient) -> bool:
        fleet = parse_fleet((await client.get("/v1/workers")).json())
        ready = {member.role for member in fleet if member.state == "ready" and not member.suspected}
        return ready >= self._roles and await models_are_ready(client)

    async def _text_model(self, client: httpx.AsyncClient) -> str:
        """Return the name of the model that writes text, or "" while a model is missing."""
        models: list[dict[str, str]] = (await client.get("/v1/models")).json()["data"]
        if len(models) <= len(self._encoders):
            return ""
        return next(name for each in models if (name := each["id"]) not in self._encoders)

    async def _stop(self) -> None:
        """Drain by SIGTERM to the supervisor alone; it ends what it started."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        except TimeoutError:
            process.send_signal(signal.SIGTERM)  # the second one does not wait
            await process.wait()

    def _tail(self) -> str:
        return "\n".join(last_lines(self._log, 30))


def clean_environment(state_dir: Path, ours: Mapping[str, str]) -> dict[str, str]:
    """Return our variables over the surroundings', without any that would change what is measured."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "OTEL_", "OMP_"))}
    paths = os.pathsep.join((str(ROOT), str(ROOT / "protos" / "gen")))
    return {**kept, "PYTHONPATH": paths, "TANDEM_STATE_DIR": str(state_dir), **ours}


async def models_are_ready(client: httpx.AsyncClient) -> bool:
    """Return whether a gateway has models, and a request of each has gone the whole way."""
    models = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
    answers = [await client.get("/readyz", params={"model": model}) for model in models]
    return bool(models) and all(answer.is_success for answer in answers)
