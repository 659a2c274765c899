"""`make wheel-test`: installs each extra into an environment of its own and starts each service from there.

The wheel is installed with the exact versions of constraints.txt. The gateway, the KV service and the two workers run
as on four machines that share nothing but loopback. A program with the `client` extra alone sends a request.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.packaging.wheel import ROOT, build_wheel

_SERVICES = {
    "control": "control_plane",
    "kv": "kv_transfer_svc",
    "prefill": "prefill_svc",
    "decode": "decode_svc",
}
_OTHERS = ("client", "cli", "all")
_NOT_FOR_USERS = ("engine", "docs", "fuzz", "dev")  # `engine` is a part of `prefill` and `decode`
_READY_SECONDS = 300.0  # the first worker compiles the kernels
_STOP_SECONDS = 60.0
_HTTP, _GRPC = "127.0.0.1:18642", "127.0.0.1:18643"
_ASK = """
import sys
from tandem_client import AI
with AI(sys.argv[1]) as ai:
    print("".join(ai.run("@tandem/demo", {"prompt": "What is 17 + 25?", "stream": True})))
for name in ("grpc", "torch", "starlette", "control_plane.app"):
    assert name not in sys.modules, name
"""


def main() -> int:
    """Install every extra, start every service, ask once; return 0 if all of it worked."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(declared) == {*_SERVICES, *_OTHERS, *_NOT_FOR_USERS}, "an extra that nobody tries"
    with tempfile.TemporaryDirectory(prefix="tandem-wheel-") as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        pythons = {extra: _environment(folder / extra, wheel, extra) for extra in (*_SERVICES, *_OTHERS)}
        _run_services(folder, pythons)
        _run_together(folder, pythons["all"])
    print("every extra installs, every service starts and ends")
    return 0


def _environment(folder: Path, wheel: Path, extra: str) -> Path:
    """Make an environment with the wheel and one extra; return its Python."""
    started = time.monotonic()
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *constraints, f"{wheel}[{extra}]"], cwd=folder.parent, check=True)
    print(f"{extra}: installed in {time.monotonic() - started:.0f} s", flush=True)
    return python


def _run_services(folder: Path, pythons: dict[str, Path]) -> None:
    """Start the four services, each from its own extra, ask them with the client's extra, and end them."""
    addresses = {"control": ["--listen", _HTTP, "--grpc-listen", _GRPC]}
    with ExitStack() as running:
        for extra, module in _SERVICES.items():
            flags = addresses.get(extra, ["--control", _GRPC])
            command = [str(pythons[extra]), "-m", module, *flags]
            running.enter_context(_service(folder, extra, command))
        _wait_until_ready(f"http://{_HTTP}/readyz")
        _ask(folder, pythons["client"])
        tandem = [str(pythons["cli"].parent / "tandem"), "status", "--url", f"http://{_HTTP}"]
        subprocess.run(tandem, cwd=folder, env=_bare(folder), check=True)


def _run_together(folder: Path, python: Path) -> None:
    """Start all services with one command from the `all` extra."""
    port, grpc_port = _HTTP.split(":")[1], _GRPC.split(":")[1]
    command = [str(python.parent / "tandem"), "up", "--port", port, "--grpc-port", grpc_port]
    with _service(folder, "up", command):
        _wait_until_ready(f"http://{_HTTP}/readyz")
        _ask(folder, python)


@contextmanager
def _service(folder: Path, name: str, command: list[str]) -> Iterator[None]:
    """Run a service until the block ends, then end it with SIGTERM; it has to end with 0."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=_bare(folder), stdout=output, stderr=output)
    try:
        yield
    except BaseException:
        process.kill()
        process.wait()
        print(f"--- {name}: exit status {process.returncode}\n{log.read_text()[-4000:]}", file=sys.stderr)
        raise
    process.send_signal(signal.SIGTERM)
    try:
        status = process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if status != 0:
        raise SystemExit(f"{name} ended with {status}:\n{log.read_text()[-4000:]}")
    print(f"{name}: started, ready, ended with 0", flush=True)


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise SystemExit(f"{url} was not ready within {_READY_SECONDS:.0f} s")


def _ask(folder: Path, python: Path) -> None:
    answer = subprocess.run(
        [str(python), "-I", "-c", _ASK, f"http://{_HTTP}"], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()
    print(f"answer: {answer}", flush=True)
    if "42" not in answer:
        raise SystemExit(f"17 + 25 was answered with {answer!r}")


def _bare(folder: Path) -> dict[str, str]:
    """Return an environment without this clone and with a state folder of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "PYTHON"))}
    return {**kept, "TANDEM_STATE_DIR": str(folder / "state")}


if __name__ == "__main__":
    sys.exit(main())
