"""Starts a real PostgreSQL for tests, on loopback, as its own user."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port

_DEBIAN = Path("/usr/lib/postgresql")


def require_postgres() -> Path:
    """Return the folder of PostgreSQL's programs. Without one, skip, or fail if skips are not allowed."""
    found = [path.parent for path in sorted(_DEBIAN.glob("*/bin/postgres"), key=lambda path: path.parts[-3])]
    on_path = shutil.which("initdb")
    if found or on_path:
        return found[-1] if found else Path(str(on_path)).parent
    reason = f"PostgreSQL is not installed: no {_DEBIAN}/*/bin/postgres; run `make services`"
    if os.environ.get("TANDEM_REQUIRE_SERVICES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Create a cluster in its own folder and run it on a free port until the block ends."""
    programs = require_postgres()
    # Not pytest's folder: only its user may read that, and PostgreSQL refuses to run as root.
    with tempfile.TemporaryDirectory(prefix="tandem-postgres-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        user = pwd.getpwnam("postgres") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
        os.chown(folder, user.pw_uid, user.pw_gid)
        server = Postgres(programs, folder / "data", user, free_port())
        server.make()
        server.start_where_it_can()
        try:
            yield server
        finally:
            server.stop()


class Postgres:
    """One cluster; `stop` and `start` simulate an outage."""

    def __init__(self, programs: Path, folder: Path, user: pwd.struct_passwd, port: int) -> None:
        self._programs = programs
        self._folder = folder
        self._user = user
        self.port = port
        self._num_databases = 0

    def make(self) -> None:
        self._run("initdb", "--pgdata", str(self._folder), "--auth", "trust", "--username", "tandem", "--no-sync")

    def start(self) -> None:
        flags = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        self._control("start", "--wait", "--options", flags, "--log", str(self._folder / "log"))

    def start_where_it_can(self) -> None:
        """Start on another port if another process has taken the free one."""
        while True:
            try:
                return self.start()
            except AssertionError:
                if "could not bind" not in (self._folder / "log").read_text(errors="replace"):
                    raise
            (self._folder / "log").unlink()
            self.port = free_port()

    def stop(self) -> None:
        self._control("stop", "--wait", "--mode", "immediate")

    def new_database(self) -> str:
        """Create an empty database; return its URL."""
        self._num_databases += 1
        name = f"tandem_{self._num_databases}"
        self._run("createdb", "--host", "127.0.0.1", "--port", str(self.port), "--username", "tandem", name)
        return f"postgresql://tandem@127.0.0.1:{self.port}/{name}"

    def _control(self, action: str, *flags: str) -> None:
        self._run("pg_ctl", action, "--pgdata", str(self._folder), *flags)

    def _run(self, program: str, *arguments: str) -> None:
        # setpriv, not `user=`: with a user, subprocess forks instead of vforking, and gRPC's handlers in the child may
        # end it by a signal before it executes the program.
        as_user = ["setpriv", f"--reuid={self._user.pw_uid}", f"--regid={self._user.pw_gid}", "--clear-groups"]
        ended = subprocess.run(
            [*(as_user if os.getuid() == 0 else []), str(self._programs / program), *arguments],
            cwd=self._folder.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": str(self._folder.parent)},
            timeout=60,
        )
        output = ended.stdout.decode()
        assert ended.returncode == 0, f"{program} {' '.join(arguments)}: exit code {ended.returncode}: {output}"
