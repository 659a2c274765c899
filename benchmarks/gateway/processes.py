"""Starts the processes of a gateway measurement, each on its cores.

The gateway, or what it is compared with, has a core of its own; stand-in worker and client have the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from benchmarks.gateway.sse_readers import post
from benchmarks.lib.served import clean_environment
from tandem_client.cli.parent_death import die_with_parent
from tandem_client.cli.supervisor import last_lines
from tandem_engine.demo import MODEL_ID
from tests.ports import free_port, free_ports

_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.1
_NUM_TRIES = 24


ALL_CORES = sorted(os.sched_getaffinity(0))
SERVER_CORES = ALL_CORES[-max(1, len(ALL_CORES) // 2) :]
"""One for each server: one of two, else half of all."""
OTHER_CORES = set(ALL_CORES) - set(SERVER_CORES) or set(ALL_CORES)
"""The client's and the worker's."""
TWO_SERVERS_CORES = SERVER_CORES if len(SERVER_CORES) > 1 else ALL_CORES
"""Where two servers are measured: one for each, if need be among the client's and the worker's."""
BESIDE_TWO_SERVERS = OTHER_CORES if len(SERVER_CORES) > 1 else set(ALL_CORES)


class Child:
    """One process and its threads, on some cores."""

    def __init__(
        self, name: str, arguments: list[str], folder: Path, variables: Mapping[str, str], cores: set[int]
    ) -> None:
        self._log = folder / f"{name}.log"
        self._log.write_bytes(b"")
        self._command = die_with_parent([sys.executable, "-m", *arguments])
        self._folder, self._variables, self._cores = folder, variables, cores
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=clean_environment(self._folder / "state", self._variables),
                cwd=self._folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.sched_setaffinity(self._process.pid, self._cores)  # before it has threads, which inherit it
        self._stats = psutil.Process(self._process.pid)

    def kill_and_start_again(self) -> None:
        self._process.kill()
        self._process.wait()
        self._start()

    @property
    def cpu_seconds(self) -> float:
        times = self._stats.cpu_times()
        return times.user + times.system

    @property
    def resident_bytes(self) -> int:
        resident: int = self._stats.memory_info().rss
        return resident

    @property
    def pss_bytes(self) -> int:
        """Its memory and that of all its children: pages that several share count in parts (PSS)."""
        total = 0
        for process in [self._stats, *self._stats.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # a child that has just ended
                total += process.memory_full_info().pss
        return total

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def client_ports(self) -> set[int]:
        """Return the far ports of this process's connections."""
        return {each.raddr.port for each in self._stats.net_connections("tcp4") if each.raddr}

    def num_logged(self, event: str) -> int:
        """Return how often it has logged that event."""
        return self._log.read_text().count(f'"event": "{event}"')

    def lines(self) -> list[str]:
        """Return what it has logged so far."""
        return self._log.read_text().splitlines()

    def check(self) -> None:
        """Raise RuntimeError if it has ended."""
        if self._process.poll() is not None:
            tail = "\n".join(last_lines(self._log, 30))
            raise RuntimeError(f"{self._log.stem} ended with exit code {self._process.returncode}:\n{tail}")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Processes:
    """Gateways, a stand-in worker and the bare app, as they are asked for; all end with the `with`."""

    def __init__(
        self,
        folder: Path,
        server_cores: Sequence[int] = SERVER_CORES,
        other_cores: Collection[int] = OTHER_CORES,
        *,
        variables: Mapping[str, str] | None = None,
        stand_in_module: str = "benchmarks.gateway.stand_in_worker",
    ) -> None:
        """`server_cores`: one for each gateway, in turn; `other_cores`: the worker's; `variables`: everyone's."""
        folder.mkdir()
        self._variables = variables or {}
        self._stand_in_module = stand_in_module
        self._folder = folder
        self._server_cores, self._other_cores = server_cores, set(other_cores)
        self._children: list[Child] = []
        self._http_port, self._bare_port = free_ports(2)
        self._grpc_ports: list[int] = []
        """One for each gateway that was started."""
        self.gateways: list[Child] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self._children):
            child.stop()

    @property
    def address(self) -> tuple[str, int]:
        """Where gateways answer HTTP."""
        return "127.0.0.1", self._http_port

    @property
    def control_addresses(self) -> list[str]:
        """Where workers register, at all gateways that were started."""
        return [f"127.0.0.1:{port}" for port in self._grpc_ports]

    @property
    def state_dir(self) -> Path:
        """The gateways' state directory."""
        return self._folder / "state"

    def gateway(self, *flags: str, checkout: Path | None = None) -> Child:
        """Start a gateway; a second one shares the first one's port, and needs --reuse-port as that one did.

        `checkout`: the folder whose code it runs; None: ours.
        """
        index = len(self.gateways)
        self._grpc_ports.append(free_port())
        variables = {
            "TANDEM_CONTROL_LISTEN": f"127.0.0.1:{self._http_port}",
            "TANDEM_CONTROL_GRPC_LISTEN": f"127.0.0.1:{self._grpc_ports[-1]}",
            "TANDEM_INSECURE_PLAINTEXT": "true",  # the stand-ins have no certificates
        }
        if checkout is not None:
            variables["PYTHONPATH"] = os.pathsep.join((str(checkout), str(checkout / "protos" / "gen")))
        core = self._server_cores[index % len(self._server_cores)]
        self.gateways.append(self._child(f"gateway-{index}", ["control_plane", *flags], variables, {core}))
        return self.gateways[-1]

    def stand_in(self, token_seconds: float = 0.0, *flags: str) -> Child:
        """Start the worker that emits tokens, and wait until every gateway has answered with some."""
        child = self.beside("stand-in", self._stand_in_module, "--token-seconds", f"{token_seconds:g}", *flags)
        # Each try is a connection of its own, and the kernel's choice: so many good ones have asked every gateway.
        for _ in range(1 if len(self.gateways) == 1 else _NUM_TRIES):
            self._wait(f"http://127.0.0.1:{self._http_port}/readyz")
        return child

    def beside(self, name: str, module: str, *flags: str) -> Child:
        """Start another process that registers with the gateways, on the worker's cores."""
        return self._child(name, [module, *self.control_addresses, *flags], {}, self._other_cores)

    def engine(self, name: str, *flags: str, variables: Mapping[str, str]) -> Child:
        """Start a real decode worker, on the workers' cores."""
        return self.service("decode_svc", name, *flags, variables=variables)

    def service(
        self,
        module: str,
        name: str,
        *flags: str,
        variables: Mapping[str, str] | None = None,
        cores: Collection[int] | None = None,
    ) -> Child:
        """Start a real service that registers with the gateways; None: on the workers' cores."""
        control = ("--control", ",".join(self.control_addresses), "--insecure-plaintext", "--listen", "127.0.0.1:0")
        arguments = [module, *control, "--worker-id", name, *flags]
        return self._child(name, arguments, variables or {}, self._other_cores if cores is None else set(cores))

    def bare(self) -> tuple[Child, tuple[str, int]]:
        """Start the bare app, on the first gateway's core; return also its address."""
        child = self._child("bare", ["benchmarks.gateway.bare_sse", str(self._bare_port)], {}, {self._server_cores[0]})
        self._wait(f"http://127.0.0.1:{self._bare_port}/", min_status=400)
        return child, ("127.0.0.1", self._bare_port)

    def _child(self, name: str, arguments: list[str], variables: Mapping[str, str], cores: set[int]) -> Child:
        child = Child(name, arguments, self._folder, {**self._variables, **variables}, cores)
        self._children.append(child)
        return child

    def _wait(self, url: str, min_status: int = 200) -> None:
        """Wait until `url` answers with 2xx, or at all."""
        deadline = time.monotonic() + _START_SECONDS
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while time.monotonic() < deadline:
                for child in self._children:
                    child.check()
                try:
                    status = client.get(url).status_code
                    if status < 300 or status in range(min_status, 500):
                        return
                except httpx.TransportError:
                    pass  # nobody listens yet
                time.sleep(_POLL_SECONDS)
        raise RuntimeError(f"{url} did not answer within {_START_SECONDS:g} s")


def native_request(num_tokens: int) -> bytes:
    """Return a call of `AI.run` over REST."""
    body = {"prompt": "hello", "raw": True, "stream": True, "max_tokens": num_tokens}
    return post(f"/client/v4/accounts/benchmark/ai/run/{MODEL_ID}", body)


def chat_request(num_tokens: int) -> bytes:
    """Return one of OpenAI's chat completions."""
    messages = [{"role": "user", "content": "hello"}]
    return post(
        "/v1/chat/completions", {"model": MODEL_ID, "messages": messages, "stream": True, "max_tokens": num_tokens}
    )
