"""A fleet of release 0.2, in plain text, becomes one with certificates: process by process, under streams."""

from __future__ import annotations

import asyncio
import datetime
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem_runtime.certificates.names import is_id
from tests.ports import free_ports
from tests.release import needs_environment, python_path, release_python, unpack
from tests.system.conftest import SMALL
from tests.system.fleet import until
from tests.system.steady_streams import SteadyStreams

_ROOT = Path(__file__).resolve().parents[2]
_MODULES = {"control": "control_plane", "kv": "kv_transfer_svc", "prefill": "prefill_svc", "decode": "decode_svc"}
_PROMPTS = [f"{number} ways to explain a KV cache. " * 12 for number in range(4)]
_NUM_TOKENS = 24


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the code of the release before."""
    return unpack(tmp_path_factory.mktemp("release"))


class _Fleet:
    """Processes of both releases, with one state directory."""

    def __init__(self, folder: Path, release: Path) -> None:
        self._folder = folder
        self._release = release
        self.run_dir = folder / "run"
        self.run_dir.mkdir(mode=0o700)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, role: str, *flags: str, is_old: bool = False, waits: bool = False) -> None:
        """Start a process; with `waits` it loads its model, and joins the fleet once it is admitted."""
        root = self._release if is_old else _ROOT
        environment = {
            **os.environ,
            "PYTHONPATH": python_path(root),
            "TANDEM_STATE_DIR": str(self._folder / "state"),
            "TANDEM_RUNTIME_DIR": str(self.run_dir),
            "TANDEM_LOG_JSON": "false",
            "OMP_NUM_THREADS": "1",
        }
        if not is_old:
            tomorrow = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
            environment["TANDEM_PLAINTEXT_UNTIL"] = tomorrow.isoformat()
        if role != "control":
            flags = ("--worker-id", name, *flags)
        if waits:
            flags = (*flags, "--join-file", str(self._folder / f"{name}.join"))
        python = release_python() if is_old else sys.executable
        with self._log(name).open("ab") as out:
            self.processes[name] = subprocess.Popen(
                [python, "-m", _MODULES[role], *flags], cwd=root, env=environment, stdout=out, stderr=out
            )

    def admit(self, name: str, role: str) -> None:
        """Let a process that waits join the fleet: give it this machine's join token."""
        draft = self._folder / f"{name}.draft"
        shutil.copyfile(self._folder / "state" / "join" / role, draft)
        draft.rename(self._folder / f"{name}.join")

    async def stop(self, *names: str) -> None:
        """Let processes drain, and wait for their ends."""
        for name in names:
            self.processes[name].send_signal(signal.SIGTERM)
        for name in names:
            await asyncio.to_thread(self.processes.pop(name).wait, 60)

    def log(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")

    def logs(self) -> str:
        return "\n\n".join(f"{name}:\n{self.log(name)[-2500:]}" for name in self.processes)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


@pytest.mark.timeout(300)
async def test_a_fleet_in_plain_text_gets_certificates_without_a_failed_stream(tmp_path: Path, release: Path) -> None:
    fleet = _Fleet(tmp_path, release)
    ports = free_ports(8)
    http_ports, grpc_ports, enrolment_port = ports[:2], ports[2:4], ports[4]
    control = ("--control", ",".join(f"127.0.0.1:{port}" for port in grpc_ports))
    here, there = (*control, "--host-id", "host-a"), (*control, "--host-id", "host-b")
    kv = ("--transports", "tcp,grpc")

    def gateway(number: int, *flags: str) -> tuple[str, ...]:
        listen = ("--listen", f"127.0.0.1:{http_ports[number]}", "--grpc-listen", f"127.0.0.1:{grpc_ports[number]}")
        return (*listen, "--local-prefill", "never", *flags)

    async def workers(number: int = 1) -> dict[str, dict[str, Any]]:
        try:
            found = (await http.get(f"http://127.0.0.1:{http_ports[number]}/v1/workers")).json()["data"]
        except httpx.TransportError:
            return {}
        return {each.get("name", each["id"]): each for each in found if each["state"] == "ready"}

    async def are_ready(*names: str, number: int = 1) -> None:
        async def ready() -> bool:
            ended = [name for name, process in fleet.processes.items() if process.poll() is not None]
            assert not ended, f"{ended} ended\n{fleet.logs()}"
            return set(await workers(number)) == set(names)

        await until(ready, 90, fleet.logs)

    http = httpx.AsyncClient(timeout=60, trust_env=False)
    streams = SteadyStreams(http, f"http://127.0.0.1:{http_ports[0]}", _PROMPTS, _NUM_TOKENS)
    try:
        # 1. A fleet of the release before, on two hosts.
        fleet.start("gateway-old", "control", *gateway(0), is_old=True)
        fleet.start("kv-a-old", "kv", *here, *kv, is_old=True)
        fleet.start("kv-b-old", "kv", *there, *kv, is_old=True)
        fleet.start("prefill-old", "prefill", *here, *SMALL, is_old=True)
        fleet.start("decode-old", "decode", *there, *SMALL, is_old=True)
        await are_ready("kv-a-old", "kv-b-old", "prefill-old", "decode-old", number=0)
        await streams.start()

        # 2. The gateway first: the old one finishes its streams.
        fleet.start("gateway", "control", *gateway(1, "--enrolment-listen", f"127.0.0.1:{enrolment_port}"))
        await are_ready("kv-a-old", "kv-b-old", "prefill-old", "decode-old")
        streams.base_url = f"http://127.0.0.1:{http_ports[1]}"
        await streams.more(4, fleet.logs)
        await fleet.stop("gateway-old")

        # 3. KV services and workers, one at a time. The workers load their model while it is not their turn yet.
        fleet.start("prefill", "prefill", *here, *SMALL, waits=True)
        fleet.start("decode", "decode", *there, *SMALL, waits=True)
        names = ["kv-a-old", "kv-b-old", "prefill-old", "decode-old"]
        for name, join in (
            ("kv-b", lambda: fleet.start("kv-b", "kv", *there, *kv)),
            ("kv-a", lambda: fleet.start("kv-a", "kv", *here, *kv)),
            ("prefill", lambda: fleet.admit("prefill", "prefill")),
            ("decode", lambda: fleet.admit("decode", "decode")),
        ):
            join()
            await are_ready(*names, name)
            await fleet.stop(f"{name}-old")
            names = [other for other in names if other != f"{name}-old"] + [name]
            await are_ready(*names)
            await streams.more(4, fleet.logs)

        # 4. Every process has its identity, KV goes from host to host, and no connection is in plain text.
        found = await workers()
        assert all(is_id(worker["id"]) for worker in found.values())
        links = {link["address"]: link for link in found["kv-b"]["kv_service"]["links"]}
        link = links[found["kv-a"]["address"]]
        assert link["transport"] == "tcp"
        assert link["num_transfers"] > 0
        await until(lambda: not list(_plain_connections(fleet.run_dir)), 20, fleet.logs)
        await streams.more(4, fleet.logs)
    finally:
        await streams.stop()
        await http.aclose()
        await fleet.stop(*fleet.processes)
    assert streams.failures == []


@needs_environment
@pytest.mark.timeout(300)
async def test_workers_of_this_release_serve_a_gateway_of_the_release_before(tmp_path: Path, release: Path) -> None:
    fleet = _Fleet(tmp_path, release)
    http_port, grpc_port = free_ports(2)
    flags = ("--control", f"127.0.0.1:{grpc_port}", "--host-id", "host-a")
    listen = ("--listen", f"127.0.0.1:{http_port}", "--grpc-listen", f"127.0.0.1:{grpc_port}")
    try:
        fleet.start("gateway", "control", *listen, "--local-prefill", "never", is_old=True)
        fleet.start("kv", "kv", *flags, is_old=True)
        for role in ("prefill", "decode"):  # both: that gateway does not know that another torch is another class
            fleet.start(role, role, *flags, *SMALL, "--insecure-plaintext")
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:

            async def is_ready() -> bool:
                ended = [name for name, process in fleet.processes.items() if process.poll() is not None]
                assert not ended, f"{ended} ended\n{fleet.logs()}"
                try:
                    return (await http.get(f"http://127.0.0.1:{http_port}/readyz")).is_success
                except httpx.TransportError:
                    return False

            await until(is_ready, 120, fleet.logs)  # a request has gone from prefill to decode
            streams = SteadyStreams(http, f"http://127.0.0.1:{http_port}", _PROMPTS, _NUM_TOKENS)
            await streams.start()
            await streams.more(4, fleet.logs)
            await streams.stop()
    finally:
        await fleet.stop(*fleet.processes)


def _plain_connections(run_dir: Path) -> Iterator[str]:
    """Yield the open connections, on this machine, to the plain side of a port in `run_dir`."""
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split()  # ... state, inode, path: of the accepted sockets, that of the listener
        if fields[5] == "03" and fields[-1].startswith(str(run_dir)) and fields[-1].endswith("/plain"):
            yield line
