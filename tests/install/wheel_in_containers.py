"""Serves from the platform wheel in containers: a Debian system of debootstrap with Python and no compiler.

Each service is a container of its own: a read-only root, volumes for the state and the sockets, 64 MB of /dev/shm, a
user without a name and with at most 256 processes. All of them share one network namespace with loopback alone. The
wheel lies in /opt/tandem of the system. Needs root (namespaces), debootstrap, bubblewrap, and what pip needs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from infra.wheels.pure import ROOT
from tests.install.steps import step
from tests.packaging.debian import make_system, pip_variables
from tests.system.container import USER, Container, Running, running
from tests.tandem_engine.encoder.checkpoints import make, write_sentence_files

_SYSTEM = ROOT / "build" / "install" / "debian"
_PREFIX = Path("/opt/tandem")
_PYTHON = str(_PREFIX / "bin" / "python")
_STATE, _SOCKETS, _MODELS = Path("/var/lib/tandem"), Path("/run/tandem"), Path("/models")
_PIP_FILES = ("/etc/pip.conf", "/etc/resolv.conf", "/etc/ssl/certs")
_COMPILERS = ("gcc", "g++", "cc", "c++", "clang")
_CONTROL = ("--control", "127.0.0.1:8643")
_SERVICES = {
    "control_plane": (),
    "kv_transfer_svc": _CONTROL,
    "prefill_svc": _CONTROL,
    "decode_svc": _CONTROL,
    "encode_svc": (*_CONTROL, "--model", str(_MODELS / "tiny-bert")),
}
_ASK = Path(__file__).with_name("ask.py")


def run(wheel: Path, folder: Path) -> None:
    """Install the wheel, start all services, ask, and end them. Raises AssertionError or CalledProcessError."""
    _install(wheel)
    container = Container(
        root=_SYSTEM,
        folder=Path("/"),
        mounts=_volumes(folder / "volumes"),
        environment={"TANDEM_STATE_DIR": str(_STATE), "TANDEM_RUNTIME_DIR": str(_SOCKETS)},
    )
    with ExitStack() as stack:
        container = replace(container, network=stack.enter_context(_network()))
        with step("five containers answer"):
            services = {
                module: stack.enter_context(running(container, _PYTHON, "-m", module, *flags))
                for module, flags in _SERVICES.items()
            }
            said = _asked(container)
        assert re.search(r"^answer: .*\b42\b", said, re.MULTILINE) and "vector: 72" in said, said
        with step("five containers drained at SIGTERM"):
            _drain(services)
    for module in ("prefill_svc", "decode_svc", "encode_svc"):
        assert re.search(r"C\+\+ kernels: prebuilt for", "\n".join(services[module].lines)), services[module].lines


@contextmanager
def _network() -> Iterator[str]:
    """Yield a network namespace with loopback alone, which lives until the block ends."""
    with running(Container(root=_SYSTEM, folder=Path("/")), "sh", "-c", "echo up; exec sleep infinity") as holder:
        holder.until("up")
        yield holder.network


def _asked(container: Container) -> str:
    """Wait until both models are served, stream an answer and embed a text; return what was printed."""
    with running(container, _PYTHON, "-I", "-c", _ASK.read_text()) as asking:
        code = asking.wait()
    said = "\n".join(asking.lines)
    assert code == 0, said
    return said


def _drain(services: Mapping[str, Running]) -> None:
    for service in services.values():
        service.terminate()
    for module, service in services.items():
        assert service.wait() == 0, f"{module}:\n" + "\n".join(service.lines)


def _install(wheel: Path) -> None:
    """Make the system once, and the environment with the wheel anew."""
    if not (_SYSTEM / "usr" / "bin" / "python3").exists():
        with step("debootstrap"):
            make_system(_SYSTEM, ("python3", "python3-venv"), (*map(Path, _PIP_FILES), _STATE, _SOCKETS, _MODELS))
    with step("pip install 'WHEEL[all]' in the system"):
        shutil.rmtree(_SYSTEM / _PREFIX.relative_to("/"), ignore_errors=True)
        _in_system("python3", "-m", "venv", str(_PREFIX))
        pip = (_PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-cache-dir")
        _in_system(*pip, "--constraint", "/tmp/constraints.txt", f"/tmp/{wheel.name}[all]", wheel=wheel)
    found = [name for name in _COMPILERS for folder in ("usr/bin", "bin") if (_SYSTEM / folder / name).exists()]
    assert not found, f"a compiler is in the system: {', '.join(found)}"


def _in_system(*command: str, wheel: Path | None = None) -> None:
    """Run a command as root in the system, which it may change, with what this machine's pip needs."""
    mounts = [("--ro-bind-try", name, name) for name in (*_PIP_FILES, *_folders_of_opt())]
    if wheel is not None:
        mounts += [("--ro-bind", str(wheel), f"/tmp/{wheel.name}")]
        mounts += [("--ro-bind", str(ROOT / "constraints.txt"), "/tmp/constraints.txt")]
    variables = [("--setenv", name, value) for name, value in {"PATH": "/usr/bin:/bin", **pip_variables()}.items()]
    arguments = [word for group in (*variables, *mounts) for word in group]
    bwrap = ["bwrap", "--clearenv", "--bind", str(_SYSTEM), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    subprocess.run([*bwrap, *arguments, *command], check=True)


def _folders_of_opt() -> list[str]:
    """Return this machine's own folders there, which a pip may be set up to read."""
    return [str(path) for path in Path("/opt").iterdir() if path.is_dir() and path != _PREFIX]


def _volumes(folder: Path) -> Sequence[str]:
    """Make the folders that are mounted: state and sockets of the user, and an encoder's checkpoint."""
    make("bert", folder / "models" / "tiny-bert")
    write_sentence_files(folder / "models" / "tiny-bert", "pooling_mode_mean_tokens")
    for path in (folder / "models").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for name in ("state", "sockets"):
        (folder / name).mkdir(mode=0o700)
        os.chown(folder / name, USER, USER)
    return (
        *("--bind", str(folder / "state"), str(_STATE), "--bind", str(folder / "sockets"), str(_SOCKETS)),
        *("--ro-bind", str(folder / "models"), str(_MODELS)),
    )
