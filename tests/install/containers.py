"""Runs an image's file system as a container runtime would: a user, a read-only root, limits, a health check.

bubblewrap makes the containers. Each has PID, IPC and UTS namespaces of its own, and the network of a `NetworkHost`.
Cgroups of version 1 limit its processes and its memory; where the machine has none, RLIMIT_NPROC limits the processes.
Volumes are folders; a new one takes owner and mode of the image's folder, as with Docker.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.lib.namespaces import NetworkHost

SHARED_MEMORY_BYTES = 64 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_POLL_SECONDS = 0.2
_CAN_BE_MADE = ("etc/hosts", "etc/resolv.conf")
"""Files that a container runtime puts into every container."""


@dataclass(frozen=True)
class Mount:
    """A folder of this machine inside a container."""

    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class ContainerSpec:
    """How one container runs, as its image and its compose file say."""

    name: str
    root: Path
    command: Sequence[str]
    environment: Mapping[str, str]
    user: str
    """UID:GID."""
    mounts: Sequence[Mount] = ()
    health: Sequence[str] = ()
    """The command of the health check."""
    read_only: bool = True
    max_processes: int = 256
    memory_bytes: int = 4 << 30
    grace_seconds: float = 150.0
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Names and addresses of /etc/hosts."""
    hostname: str = ""
    """The name of its machine; the container's name if empty."""


class Container:
    """One container; `start` may be called again after its end, as a restart policy does."""

    def __init__(self, spec: ContainerSpec, network: NetworkHost, logs: Path) -> None:
        self.spec = spec
        self.network = network
        self._log = logs / f"{spec.name}.log"
        self._hosts = logs / f"{spec.name}.hosts"
        self._process: subprocess.Popen[bytes] | None = None
        self._resolver = logs / "resolv.conf"
        self._resolver.write_text("nameserver 127.0.0.1\n")  # refuses at once: names are those of /etc/hosts
        self._hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in spec.hosts.items()))

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def start(self) -> None:
        """Start the command; its output is appended to a log."""
        _make_mount_points(self.spec)
        with self._log.open("ab") as log:
            self._process = self.network.run(
                lambda: subprocess.Popen(
                    self._bubblewrap(self.spec.command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    def run(self, *arguments: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run other arguments of the entry point in a container of its own, as `docker compose run --rm` does."""
        _make_mount_points(self.spec)
        command = self._bubblewrap([*self.spec.command, *arguments])
        return self.network.run(
            lambda: subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        )

    def execute(self, *command: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command inside this container, as `docker exec` does."""
        entered = ["nsenter", "--target", str(self._first.pid), "--pid", "--mount", "--net", "--ipc", "--uts"]
        environment = [f"{name}={value}" for name, value in self.spec.environment.items()]
        command = (*entered, *_as_user(self.spec.user), "env", "-i", *environment, *command)
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)

    def check_health(self) -> str:
        """Run the health check; return "" if the container is healthy, else what the check printed."""
        if not self._is_there:
            return "it starts, or has ended"
        done = self.execute(*self.spec.health)
        return "" if done.returncode == 0 else (done.stderr or done.stdout or f"exit code {done.returncode}").strip()

    def wait_healthy(self, seconds: float) -> float:
        """Wait until the health check passes; return the seconds that it took."""
        started, problem = time.monotonic(), "it was not asked"
        while time.monotonic() - started < seconds:
            assert not self.has_ended, f"{self.spec.name} has ended:\n{self.output[-4000:]}"
            problem = self.check_health()
            if not problem:
                return time.monotonic() - started
            wait_a_moment()
        raise AssertionError(f"{self.spec.name} is not healthy after {seconds:g} s: {problem}\n{self.output[-4000:]}")

    def kill(self) -> None:
        """Kill process 1 with SIGKILL: the kernel ends all others."""
        self._first.send_signal(signal.SIGKILL)
        self._popen.wait(30)

    def terminate(self) -> None:
        """Send SIGTERM to process 1, as `docker stop` does."""
        self._first.send_signal(signal.SIGTERM)

    def stop(self) -> float:
        """End with SIGTERM, which must give exit code 0 within the grace period; return the seconds."""
        started = time.monotonic()
        self.terminate()
        code = self.wait(self.spec.grace_seconds)
        assert code == 0, f"{self.spec.name} ended with {code}:\n{self.output[-4000:]}"
        return time.monotonic() - started

    def wait(self, seconds: float) -> int:
        """Return the exit code of the command, which must end within `seconds`."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.spec.name} did not end within {seconds:g} s:\n{self.output[-4000:]}") from None

    def close(self) -> None:
        """Kill what is left, and remove the cgroup."""
        if self._process is not None and self._process.poll() is None:
            for child in psutil.Process(self._process.pid).children():
                child.kill()
            self._process.kill()
            self._process.wait()
        for group in filter(Path.is_dir, self._groups):
            _remove_group(group)

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    @property
    def processes(self) -> list[psutil.Process]:
        return [self._first, *self._first.children(recursive=True)]

    @property
    def _popen(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the container was started"
        return self._process

    @property
    def _is_there(self) -> bool:
        """Whether bubblewrap runs, and not the shell before it, and has its child."""
        try:
            outside = psutil.Process(self._popen.pid)
            return outside.name() == "bwrap" and len(outside.children()) == 1
        except psutil.NoSuchProcess:
            return False

    @property
    def _first(self) -> psutil.Process:
        """The container's process 1: bubblewrap's only child."""
        [first] = psutil.Process(self._popen.pid).children()
        return first

    @property
    def _groups(self) -> list[Path]:
        """The cgroups of this container: of processes and of memory; [] where the machine has no version 1."""
        controllers = [_CGROUPS / "pids", _CGROUPS / "memory"]
        name = f"tandem-install-{os.getpid()}-{self.spec.name}"
        return [each / name for each in controllers] if all(map(Path.is_dir, controllers)) else []

    def _bubblewrap(self, command: Sequence[str]) -> list[str]:
        spec = self.spec
        variables = [word for item in spec.environment.items() for word in ("--setenv", *item)]
        mounts = [
            word
            for mount in spec.mounts
            for word in ("--ro-bind" if mount.read_only else "--bind", str(mount.source), mount.target)
        ]
        return [
            *("sh", "-c", _LIMITED, " ".join(map(str, self._groups)), str(spec.max_processes), str(spec.memory_bytes)),
            *(
                "bwrap",
                "--unshare-ipc",
                "--unshare-uts",
                "--hostname",
                spec.hostname or spec.name,
                "--unshare-pid",
                "--as-pid-1",
            ),
            *("--clearenv", *variables, "--ro-bind" if spec.read_only else "--bind", str(spec.root), "/"),
            *("--ro-bind", str(self._hosts), "/etc/hosts", "--ro-bind", str(self._resolver), "/etc/resolv.conf"),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--size", str(SHARED_MEMORY_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm"),
            *mounts,
            *("--chdir", "/", *_as_user(spec.user), *command),
        ]


_LIMITED = """
set -e
groups="$0"; max_processes="$1"; memory="$2"; shift 2
if [ -z "$groups" ]; then exec prlimit --nproc="$max_processes" "$@"; fi
for group in $groups; do
    mkdir -p "$group"
    case "$group" in
        */pids/*) echo "$max_processes" > "$group/pids.max" ;;
        *) echo "$memory" > "$group/memory.limit_in_bytes" ;;
    esac
    echo $$ > "$group/cgroup.procs"
done
exec "$@"
"""


def _remove_group(group: Path) -> None:
    wait_until(lambda: not (group / "cgroup.procs").read_text(), 10, f"{group} is empty")
    group.rmdir()


def _as_user(user: str) -> list[str]:
    """Return the command that becomes the user, without capabilities and without a way to get any."""
    uid, _, gid = user.partition(":")
    rights = ["--clear-groups", "--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs"]
    return ["setpriv", "--reuid", uid, "--regid", gid or uid, *rights]


def _make_mount_points(spec: ContainerSpec) -> None:
    """Make what a runtime makes in a container's own layer: mount points."""
    for name in _CAN_BE_MADE:
        path = spec.root / name
        if path.is_symlink():
            path.unlink()
        path.touch()
    for mount in spec.mounts:
        target = spec.root / mount.target.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        fill_volume(mount.source, target)


def fill_volume(volume: Path, target: Path) -> None:
    """Give a volume that is new the owner and the mode of the image's folder."""
    if volume.exists():
        return
    volume.mkdir(parents=True)
    os.chown(volume, target.stat().st_uid, target.stat().st_gid)
    volume.chmod(target.stat().st_mode & 0o7777)


def seconds_of(text: str) -> float:
    """Return the seconds of a duration as Go writes it: 2m30s."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)(ms|h|m|s)", text))


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until the condition holds; raises AssertionError that names it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        wait_a_moment()


def wait_a_moment() -> None:
    """Let others run between two looks at a condition."""
    threading.Event().wait(_POLL_SECONDS)


def require_programs(*names: str) -> list[str]:
    """Return the programs that are missing."""
    return [name for name in names if shutil.which(name) is None]
