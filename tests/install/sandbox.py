"""Runs a process as a container or a hardened unit does: a user, a read-only root, folders to write, its variables.

There is no image and no systemd: the root has this machine's programs and this checkout, /opt/tandem is its virtual
environment, and bubblewrap makes the namespaces.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.lib.namespaces import NetworkHost
from tandem_engine.ops.cpu.compile import KernelsUnavailable, compile_kernels
from tests.system.container import ROOT, SHARED_MEMORY_BYTES, _parents, _read_only_root

PREFIX = "/opt/tandem"


@dataclass(frozen=True)
class Sandbox:
    """Where a process runs."""

    name: str
    network: NetworkHost
    user: int
    log: Path
    """Everything that the process prints; a process that is started again appends."""
    environment: Mapping[str, str] = field(default_factory=dict)
    writable: Mapping[str, Path] = field(default_factory=dict)
    """Paths of the process, and the folders that are mounted there."""
    read_only: Mapping[str, Path] = field(default_factory=dict)
    host_name: str = "localhost"

    def start(self, command: Sequence[str]) -> Running:
        """Start `command` as process 1 of its own PID namespace."""
        with self.log.open("ab") as log:
            process = self.network.run(
                lambda: subprocess.Popen(
                    self._command(command), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                )
            )
        return Running(self, process, time.monotonic())

    def _command(self, command: Sequence[str]) -> list[str]:
        variables = [("--setenv", name, value) for name, value in self.environment.items()]
        mounts = [("--bind", folder, path) for path, folder in self.writable.items()]
        mounts += [("--ro-bind", source, path) for path, source in {**self.read_only, **_prefix()}.items()]
        return [
            *("bwrap", "--unshare-ipc", "--unshare-uts", "--unshare-pid", "--as-pid-1", "--clearenv"),
            *("--hostname", self.host_name),
            *(word for variable in variables for word in variable),
            *_read_only_root(),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--size", str(SHARED_MEMORY_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm"),
            *(word for kind, source, path in mounts for word in (*_parents(Path(path)), kind, str(source), path)),
            *("--remount-ro", "/", "--chdir", "/"),
            *self.as_user(),
            *command,
        ]

    def as_user(self) -> list[str]:
        """Return the command that becomes the user, without any right."""
        user = ("--reuid", str(self.user), "--regid", str(self.user), "--clear-groups")
        return ["setpriv", *user, "--bounding-set", "-all", "--no-new-privs"]


class Ended(Exception):
    """The process has ended, so nothing can be done beside it."""


class Running:
    """A process in its sandbox."""

    def __init__(self, sandbox: Sandbox, process: subprocess.Popen[bytes], started: float) -> None:
        self.sandbox = sandbox
        self._process = process
        self.started = started

    def execute(self, command: Sequence[str], seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command beside the process, with its namespaces, user and variables (`kubectl exec`). Raises Ended."""
        variables = [f"{name}={value}" for name, value in self.sandbox.environment.items()]
        return subprocess.run(
            [*self.entering(), "env", "-i", *variables, *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )

    def entering(self) -> list[str]:
        """Return the command that enters the namespaces as the user."""
        return ["nsenter", "-t", str(self._first.pid), "-m", "-u", "-i", "-n", "-p", *self.sandbox.as_user()]

    def terminate(self) -> None:
        """Send SIGTERM to process 1, as the container runtime does. Does nothing if it has ended."""
        with contextlib.suppress(Ended, psutil.NoSuchProcess):
            self._first.terminate()

    def wait(self, seconds: float) -> int | None:
        """Return the exit code; None if the process has not ended after `seconds`."""
        try:
            return self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        if self._process.poll() is None:
            for first in psutil.Process(self._process.pid).children():
                first.kill()
            self._process.kill()
            self._process.wait()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def tail(self, num_lines: int = 15) -> str:
        return "\n".join(self.sandbox.log.read_text(errors="replace").splitlines()[-num_lines:])

    @property
    def _first(self) -> psutil.Process:
        """Raises Ended. bubblewrap's only child is there soon after the start, and until the end."""
        while self._process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for first in psutil.Process(self._process.pid).children():
                    return first
        raise Ended(f"{self.sandbox.name} has ended with {self._process.returncode}: {self.tail(3)}")


def wait_until(holds: Callable[[], bool], seconds: float, what: str, every: float = 0.1) -> float:
    """Wait for a condition; return the seconds that it took. Raises AssertionError after `seconds`."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds:g} s"
        time.sleep(every)
    return time.monotonic() - began


def owned_folder(path: Path, user: int, group: int, mode: int) -> Path:
    """Make a folder, and open the way to it for other users."""
    path.mkdir(parents=True)
    shutil.chown(path, user, group)
    path.chmod(mode)
    return path


def _prefix() -> dict[str, Path]:
    """Return what stands for the install prefix: this checkout's virtual environment."""
    return {PREFIX: Path(sys.prefix).resolve()}


def base_variables() -> dict[str, str]:
    """Return what an image sets: the PATH; and where this checkout's packages are, which an image has installed."""
    return {
        "PATH": f"{PREFIX}/bin:/usr/bin:/bin",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def kernels() -> Iterator[tuple[dict[str, Path], dict[str, str]]]:
    """Yield a mount and a variable for compiled kernels: images have them, and a process would compile them first."""
    with tempfile.TemporaryDirectory(prefix="tandem-kernels-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        try:
            shutil.copytree(compile_kernels().parent, folder / "tandem" / "kernels")
        except KernelsUnavailable:  # plain torch then
            yield {}, {}
            return
        for each in (folder / "tandem", folder / "tandem" / "kernels"):
            each.chmod(0o755)
        yield {"/cache": folder}, {"XDG_CACHE_HOME": "/cache"}
