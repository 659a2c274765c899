"""Installs the built wheels from nothing, and serves from them.

1. The platform wheel in a new environment, without a compiler: `tandem up` streams with the wheel's own kernels.
2. The pure wheel in its place, with a compiler: the first start compiles the kernels.
3. All services as containers of a Debian system without a compiler (tests/install/wheel_in_containers.py).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from infra.wheels.__main__ import build
from infra.wheels.pure import ROOT
from tests.install import wheel_in_containers
from tests.install.steps import step

_PORT, _GRPC_PORT = "18742", "18743"
_READY_SECONDS, _STOP_SECONDS = 180.0, 60.0
_COMPILERS = ("g++", "c++", "clang++", "gcc", "cc", "clang")


def main() -> int:
    """Run every step; return 0 if all of it held. Raises AssertionError or CalledProcessError if it did not."""
    with tempfile.TemporaryDirectory(prefix="tandem-install-") as name:
        folder = Path(name)
        with step("wheels built"):
            [pure] = build("any", folder / "wheels")
            [made] = build(platform.machine(), folder / "wheels")
        started = time.monotonic()
        environment = _installed(folder / "environment", made)
        with _up(folder / "first", environment / "bin", str(environment / "bin"), {}) as state:
            first = _first_token()
            print(f"  from nothing to the first token: {time.monotonic() - started:.1f} s", flush=True)
            assert "42" in first, first
        _assert_kernels(state, r"C\+\+ kernels: prebuilt for (x86-64-v\d|aarch64)")
        with step("the pure wheel in its place"):
            _pip(environment, "--no-deps", "--force-reinstall", str(pure))
        assert not list(environment.rglob("prebuilt")), "the platform wheel's kernels are left"
        cache = {"XDG_CACHE_HOME": str(folder / "cache")}
        with _up(folder / "second", environment / "bin", f"{environment / 'bin'}:/usr/bin:/bin", cache) as state:
            assert "42" in _first_token()
        _assert_kernels(state, r"C\+\+ kernels: compiled on this machine; the package holds no compiled kernels")
        wheel_in_containers.run(made, folder)
    print("the wheels install and serve")
    return 0


def _installed(environment: Path, wheel: Path) -> Path:
    with step("new environment"):
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    with step("pip install 'WHEEL[all]'"):
        _pip(environment, "--constraint", str(ROOT / "constraints.txt"), f"{wheel}[all]")
    return environment


def _pip(environment: Path, *arguments: str) -> None:
    command = [str(environment / "bin" / "pip"), "install", "-qq", "--disable-pip-version-check", *arguments]
    subprocess.run(command, cwd=environment, check=True)


@contextmanager
def _up(folder: Path, programs: Path, path: str, variables: Mapping[str, str]) -> Iterator[Path]:
    """Run `tandem up` in an empty folder until the block ends; yield its state directory."""
    for name in ("work", "state", "sockets"):
        (folder / name).mkdir(parents=True, mode=0o700)
    if not variables:
        assert not any(shutil.which(name, path=path) for name in _COMPILERS), f"a compiler is in {path}"
    folders = {"TANDEM_STATE_DIR": str(folder / "state"), "TANDEM_RUNTIME_DIR": str(folder / "sockets")}
    environment = {"PATH": path, "HOME": str(folder / "work"), **folders, **variables}
    command = [str(programs / "tandem"), "up", "--port", _PORT, "--grpc-port", _GRPC_PORT]
    started = time.monotonic()
    with subprocess.Popen(
        command, cwd=folder / "work", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            _wait_until_ready(process)
            print(f"  tandem up: ready after {time.monotonic() - started:.1f} s", flush=True)
            yield folder / "state"
            with step("tandem up: drained"):
                process.send_signal(signal.SIGTERM)
                assert process.wait(_STOP_SECONDS) == 0
        finally:
            if process.poll() is None:
                process.kill()


def _wait_until_ready(process: subprocess.Popen[str]) -> None:
    """Read until all services answer; `tandem up` itself ends when one of them does not start."""
    assert process.stdout is not None, "the process was started with a pipe"
    lines: list[str] = []
    deadline = time.monotonic() + _READY_SECONDS
    for line in process.stdout:
        lines.append(line)
        if "Ctrl-C drains" in line:
            return
        assert time.monotonic() < deadline, f"not ready after {_READY_SECONDS:.0f} s:\n{''.join(lines)}"
    raise AssertionError(f"`tandem up` ended:\n{''.join(lines)}")


def _first_token() -> str:
    """Stream an answer; print when its first token came, and return the answer."""
    body = b'{"model": "@tandem/demo", "stream": true, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}'
    url = f"http://127.0.0.1:{_PORT}/v1/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    started = time.monotonic()
    pieces: list[str] = []
    with opener.open(request, timeout=60) as answer:
        for line in answer:
            if found := re.search(rb'"content": ?"([^"]+)"', line):
                if not pieces:
                    print(f"  first token: {time.monotonic() - started:.3f} s", flush=True)
                pieces.append(found[1].decode())
    return "".join(pieces)


def _assert_kernels(state: Path, pattern: str) -> None:
    """Both engines' logs name where their kernels come from."""
    for role in ("prefill", "decode"):
        logs = "".join(path.read_text() for path in sorted(state.rglob(f"{role}*.log")))
        found = re.search(pattern, logs)
        assert found, f"{role} never logged {pattern}:\n{logs[-3000:]}"
        print(f"  {role}: {found[0]}", flush=True)


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
