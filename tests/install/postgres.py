"""Runs this machine's PostgreSQL with the command, the volumes and the health check of compose.yaml."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lib.namespaces import NetworkHost
from tests.control_plane.postgres import require_postgres
from tests.install.containers import wait_until

_START_SECONDS = 60.0
_STOP_SECONDS = 60.0


class ComposePostgres:
    """The service `postgres` of the file. The image's own part, which makes the database, is done here."""

    def __init__(self, service: Mapping[str, Any], volumes: Path, network: NetworkHost, log: Path) -> None:
        self._service, self._network, self._log = service, network, log
        self._programs = require_postgres()
        self._user = pwd.getpwnam("postgres")
        self._data, self._socket = volumes / "database" / "data", volumes / "database-socket"
        for folder in (self._data.parent, self._socket):
            folder.mkdir()
            os.chown(folder, self._user.pw_uid, self._user.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        """Do what the image does at its first start: make the cluster and the database."""
        names = self._service["environment"]
        self._run("initdb", "--pgdata", str(self._data), "--username", names["POSTGRES_USER"], "--auth", "trust")
        self.start()
        self._run("createdb", "--host", "127.0.0.1", "--username", names["POSTGRES_USER"], names["POSTGRES_DB"])

    def start(self) -> None:
        """Start the server as the file says, and wait until its health check passes."""
        program, *flags = self._service["command"]
        command = [str(self._programs / program), *flags, "-D", str(self._data), "-k", str(self._socket)]
        with self._log.open("ab") as log:
            self._process = self._network.run(
                lambda: subprocess.Popen(
                    self._as_user(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
                )
            )
        wait_until(self._is_healthy, _START_SECONDS, "PostgreSQL is healthy")

    def kill(self) -> None:
        """Kill the server and its children, as the end of a container does: children alone would keep the cluster."""
        children = psutil.Process(self._running.pid).children(recursive=True)
        self._running.kill()
        for child in children:
            child.kill()
        self._running.wait(_STOP_SECONDS)
        psutil.wait_procs(children, _STOP_SECONDS)

    def stop(self) -> int:
        """End with SIGINT, the stop signal of PostgreSQL's image; return the exit code."""
        self._running.send_signal(2)
        return self._running.wait(_STOP_SECONDS)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "PostgreSQL was started"
        return self._process

    def _is_healthy(self) -> bool:
        assert self._running.poll() is None, f"PostgreSQL has ended:\n{self._log.read_text()[-2000:]}"
        _, program, *flags = self._service["healthcheck"]["test"]
        command = [str(self._programs / program), *flags]
        return self._network.run(lambda: subprocess.run(command, capture_output=True, check=False)).returncode == 0

    def _run(self, program: str, *arguments: str) -> None:
        command = self._as_user([str(self._programs / program), *arguments])
        done = self._network.run(
            lambda: subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60, check=False)
        )
        assert done.returncode == 0, f"{program}: {done.stderr}"

    def _as_user(self, command: list[str]) -> list[str]:
        return ["setpriv", f"--reuid={self._user.pw_uid}", f"--regid={self._user.pw_gid}", "--clear-groups", *command]
