"""`tandem up` serves in containers, or ends with one sentence that names what to set.

docs/operate/containers.md has the table of the conditions.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tandem_engine.ops.cpu.compile import KernelsUnavailable, compile_kernels
from tests.ports import free_ports
from tests.system.container import USER, Container, require_containers, running

TANDEM = str(Path(sys.executable).with_name("tandem"))
FOLDERS = {"TANDEM_STATE_DIR": "/run/state", "TANDEM_RUNTIME_DIR": "/run/sockets"}

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _containers() -> None:
    require_containers()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for XDG_CACHE_HOME with compiled kernels: a container would compile them at each start."""
    folder = tmp_path_factory.mktemp("cache")
    try:
        compiled = compile_kernels()
    except KernelsUnavailable:  # no compiler: containers then have none either, and use plain torch
        return folder
    shutil.copytree(compiled.parent, folder / "tandem" / "kernels")
    (folder / "tandem" / "kernels").chmod(0o755)  # the original is closed to other users
    folder.chmod(0o755)
    return folder


def test_it_serves_as_process_1_of_a_container_with_little_of_everything(kernels: Path) -> None:
    container = Container(
        writable=("/run",),
        mounts=("--ro-bind", str(kernels), "/cache"),
        environment={**FOLDERS, "XDG_CACHE_HOME": "/cache"},
        memfd_noexec=2,
    )
    with running(container, "tandem", "up") as up:
        up.until("Ctrl-C drains")
        assert "42" in up.output_of(TANDEM, "run", "What is 17 + 25?")
        assert up.interrupt() == 0
        assert up.lines[-1] == "Stopped."


def test_it_serves_beside_the_processes_and_in_the_network_of_its_host(kernels: Path, tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text(f"user:x:{USER}:{USER}::/home/user:/bin/sh\n")
    container = Container(
        writable=("/home/user", "/tmp"),
        mounts=("--ro-bind", str(tmp_path / "passwd"), "/etc/passwd", "--ro-bind", str(kernels), "/cache"),
        environment={"XDG_CACHE_HOME": "/cache"},
        is_isolated=False,
    )
    port, grpc_port = map(str, free_ports(2))
    with running(container, "tandem", "up", "--port", port, "--grpc-port", grpc_port) as up:
        up.until("Ctrl-C drains")
        assert "42" in up.output_of(TANDEM, "run", "--url", f"http://127.0.0.1:{port}", "What is 17 + 25?")
        assert up.interrupt() == 0
        assert "/home/user/.local/state/tandem/logs" in "\n".join(up.lines)


@pytest.mark.parametrize(
    ("container", "command", "sentence"),
    [
        (Container(), "tandem up", "no home folder (no HOME, no entry in passwd); set TANDEM_STATE_DIR to a folder"),
        (
            Container(environment={"TANDEM_STATE_DIR": "/dev"}),
            "tandem up",
            "cannot write logs: [Errno 13] Permission denied: '/dev/logs'; set TANDEM_STATE_DIR to a folder that",
        ),
        (
            Container(writable=("/run",), environment=FOLDERS, max_processes=60),
            "tandem up",
            "the limit of processes and threads is 60, 80 are needed at least; raise it (pids.max of the container",
        ),
        (
            Container(writable=("/run",), environment=FOLDERS, max_processes=10),
            "python -m kv_transfer_svc",
            "the limit of processes and threads is 10, 20 are needed at least; raise it (pids.max of the container",
        ),
        (
            Container(writable=("/run",), environment={"TANDEM_STATE_DIR": "/run/state"}),
            "python -m kv_transfer_svc --insecure-plaintext",
            f"the folder /tmp/tandem-{USER}: [Errno 30] Read-only file system: '/tmp'; set TANDEM_RUNTIME_DIR",
        ),
    ],
)
def test_what_a_container_lacks_is_named_with_what_to_set(container: Container, command: str, sentence: str) -> None:
    with running(container, *command.split()) as refused:
        assert refused.wait() in (1, 2)
        assert sentence in refused.lines[-1]
        assert "Traceback" not in "".join(refused.lines)


def test_folders_on_a_read_only_mount_are_named_with_what_to_set(tmp_path: Path) -> None:
    """They are the user's own, and made before the container was started."""
    for name in ("state", "sockets"):
        (tmp_path / name).mkdir(mode=0o700)
        os.chown(tmp_path / name, USER, USER)
    state, sockets = (("--ro-bind", str(tmp_path / name), f"/run/{name}") for name in ("state", "sockets"))
    for mounts, flags, sentence in (
        (state, (), "Read-only file system: '/run/state/certificates'; set TANDEM_STATE_DIR (--state-dir) to a folder"),
        (sockets, ("--insecure-plaintext",), "cannot write in the folder /run/sockets; set TANDEM_RUNTIME_DIR to one"),
    ):
        container = Container(writable=("/run",), mounts=mounts, environment=FOLDERS)
        with running(container, "python", "-m", "kv_transfer_svc", *flags) as refused:
            assert refused.wait() == 2
            assert sentence in refused.lines[-1]
