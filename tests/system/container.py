"""Runs commands as in a container: in namespaces of their own, with a read-only root, as a user without rights.

There is no image. The root has this machine's programs and libraries, this checkout, its Python and nothing else: no
/tmp, no folder that can be written, no table of users. Or it is a folder that holds another system, as debootstrap
makes one. bubblewrap makes the root, and setpriv then becomes the user.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
USER = 100_000 + os.getpid()
"""A user without a name, another one for each run of the tests: limits count a user's processes on the machine."""
SHARED_MEMORY_BYTES = 64 << 20
"""The size of /dev/shm in Docker."""
MAX_PROCESSES = 256
"""Processes and threads of the user (RLIMIT_NPROC). At the limit of a pids cgroup the error is the same."""
_BIN = Path(sys.executable).parent
_CAN_WRITE = ("--perms", "0777", "--tmpfs")


@dataclass(frozen=True)
class Container:
    """The conditions of one container. `writable`: folders in memory that its user can write."""

    root: Path | None = None
    """A folder with another system; None: this machine's programs, this checkout and its Python."""
    folder: Path = ROOT
    """Where commands start."""
    writable: Sequence[str] = ()
    mounts: Sequence[str] = ()
    """More arguments of bubblewrap, such as ("--ro-bind", SOURCE, TARGET)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    max_processes: int = MAX_PROCESSES
    memfd_noexec: int = 0
    """vm.memfd_noexec of the PID namespace: 1 makes memfds that cannot be executed, 2 refuses all others."""
    is_isolated: bool = True
    """Whether the command is process 1 of its own PID namespace and has a network with loopback alone; else it shares
    both with the host."""
    network: str = ""
    """The network namespace of another container (`Running.network`), which an isolated command joins instead."""

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs `arguments` in this container. `tandem` is on its PATH."""
        environment = {"PATH": "/usr/bin:/bin"}
        if self.root is None:
            environment = {"PATH": f"{_BIN}:/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}"}
        namespaces = ["--unshare-ipc", "--unshare-uts"]
        if self.is_isolated:
            namespaces += ["--unshare-pid", "--as-pid-1", *([] if self.network else ["--unshare-net"])]
        variables = [("--setenv", name, value) for name, value in {**environment, **self.environment}.items()]
        return [
            *(("nsenter", f"--net={self.network}") if self.network else ()),
            *("bwrap", *namespaces, "--clearenv"),
            *(word for variable in variables for word in variable),
            *(_read_only_root() if self.root is None else ("--ro-bind", str(self.root), "/")),
            *(word for path in self.writable for word in (*_parents(Path(path)), *_CAN_WRITE, path)),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--size", str(SHARED_MEMORY_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm"),
            *self.mounts,
            *("--remount-ro", "/", "--chdir", str(self.folder)),
            *("sh", "-c", _AS_USER, str(self.memfd_noexec), str(self.max_processes), *arguments),
        ]


_AS_USER = f"""
set -e
if [ "$0" != 0 ]; then echo "$0" > /proc/sys/vm/memfd_noexec; fi
max_processes="$1"; shift
exec setpriv --reuid {USER} --regid {USER} --clear-groups --bounding-set -all --no-new-privs \
    prlimit --nproc="$max_processes" "$@"
"""


def _read_only_root() -> list[str]:
    """Return the mounts of this machine's programs, this checkout and its Python."""
    arguments = []
    for path in (Path("/", name) for name in ("usr", "bin", "sbin", "lib", "lib64")):
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            arguments += ["--ro-bind", str(path), str(path)]
    environment = Path(sys.prefix).resolve()  # .venv may be a link to another checkout's
    for needed in (Path("/etc/ld.so.cache"), Path("/etc/alternatives"), ROOT, environment, Path(sys.base_prefix)):
        arguments += [*_parents(needed), "--ro-bind-try", str(needed), str(needed)]
    return arguments


def _parents(path: Path) -> list[str]:
    """Return arguments that make the folders above `path`. Those that bubblewrap makes by itself are root's alone."""
    above = reversed(path.parents[:-1])
    return [word for folder in above for word in ("--perms", "0755", "--dir", str(folder))]


@contextmanager
def running(container: Container, *arguments: str) -> Iterator[Running]:
    """Run a command in a container; what is left of it at the end of the block is killed."""
    process = subprocess.Popen(
        container.command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            yield Running(process)
        finally:
            if process.poll() is None:
                for first in psutil.Process(process.pid).children():
                    first.kill()  # --die-with-parent does not outlive the change of the user
                process.kill()


class Running:
    """A command in a container, and the lines that it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []

    def until(self, words: str) -> None:
        """Read until a line contains `words`; the test's timeout ends the wait."""
        assert self._process.stdout is not None, "the process was started with a pipe"
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            if words in line:
                return
        raise AssertionError(f"{words!r} was never printed:\n" + "\n".join(self.lines))

    def output_of(self, *arguments: str) -> str:
        """Run a command of this machine in the container's network; return what it prints."""
        command = ["nsenter", f"--net={self.network}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def network(self) -> str:
        """The container's network namespace, as another container may join it."""
        return f"/proc/{self._first.pid}/ns/net"

    def terminate(self) -> None:
        """Send SIGTERM to the command, as `docker stop` does."""
        self._first.terminate()

    def interrupt(self) -> int:
        """Send SIGTERM to the command, as `docker stop` does; return its exit code once it has ended."""
        self.terminate()
        return self.wait()

    def press_ctrl_c(self) -> int:
        """Send SIGINT to the command and its children, as a terminal does; return its exit code once it has ended."""
        for process in [self._first, *self._first.children()]:
            process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        assert self._process.stdout is not None, "the process was started with a pipe"
        self.lines += self._process.stdout.read().splitlines()
        return self._process.wait()

    @property
    def _first(self) -> psutil.Process:
        """The container's first process: bubblewrap's only child."""
        [first] = psutil.Process(self._process.pid).children()
        return first


def require_containers() -> None:
    """Skip the test, with a sentence, where no container can be made; fail if skips are not allowed."""
    if shutil.which("bwrap") is None:
        reason = "there is no command `bwrap`; run `make services`"
        if os.environ.get("TANDEM_REQUIRE_SERVICES") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    tried = subprocess.run(Container().command("true"), capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"containers need root (CAP_SYS_ADMIN): {tried.stderr.strip()}")
