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
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO

from infra.wheels.pure import ROOT, build_wheel

_SERVICES = {
    "control": "control_plane",
    "kv": "kv_transfer_svc",
    "prefill": "prefill_svc",
    "decode": "decode_svc",
}
_OTHERS = ("encode", "client", "cli", "all")
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
        outputs = {}
        for extra, module in _SERVICES.items():
            flags = addresses.get(extra, ["--control", _GRPC])
            command = [str(pythons[extra]), "-m", module, *flags]
            outputs[extra] = running.enter_context(_service(folder, extra, command))
        outputs["control"].wait_for('"model_ready"', '"handed_over": true')
        _ask(folder, pythons["client"])
        tandem = [str(pythons["cli"].parent / "tandem"), "status", "--url", f"http://{_HTTP}"]
        subprocess.run(tandem, cwd=folder, env=_bare(folder), check=True)


def _run_together(folder: Path, python: Path) -> None:
    """Start all services with one command from the `all` extra."""
    port, grpc_port = _HTTP.split(":")[1], _GRPC.split(":")[1]
    command = [str(python.parent / "tandem"), "up", "--port", port, "--grpc-port", grpc_port]
    with _service(folder, "up", command) as output:
        output.wait_for("Tandem is ready after")
        _ask(folder, python)


class _Output:
    """What a service prints: kept in full, and waited for line by line."""

    def __init__(self, name: str, pipe: IO[str]) -> None:
        self._name = name
        self._pipe = pipe
        self._lines: list[str] = []
        self._unread: Queue[str | None] = Queue()
        self._reader = Thread(target=self._read, name=f"output of {name}")
        self._reader.start()

    def wait_for(self, *parts: str) -> None:
        """Return once the service has printed a line with all parts; raises SystemExit if it has not in time."""
        deadline = time.monotonic() + _READY_SECONDS
        line: str | None = ""
        while line is not None:
            if all(part in line for part in parts):
                return
            try:
                line = self._unread.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise SystemExit(f"{self._name} printed no {parts} within {_READY_SECONDS:.0f} s") from None
        raise SystemExit(f"{self._name} ended before it printed {parts}")

    def end(self) -> str:
        """Return the last of what was printed; the service has ended."""
        self._reader.join()
        return "".join(self._lines)[-4000:]

    def _read(self) -> None:
        with self._pipe:
            for line in self._pipe:
                self._lines.append(line)
                self._unread.put(line)
        self._unread.put(None)


@contextmanager
def _service(folder: Path, name: str, command: list[str]) -> Iterator[_Output]:
    """Run a service until the block ends, then end it with SIGTERM; it has to end with 0."""
    process = subprocess.Popen(
        command, cwd=folder, env=_bare(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    output = _Output(name, process.stdout)
    try:
        yield output
    except BaseException:
        process.kill()
        process.wait()
        print(f"--- {name}: exit status {process.returncode}\n{output.end()}", file=sys.stderr)
        raise
    process.send_signal(signal.SIGTERM)
    try:
        status = process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if status != 0:
        raise SystemExit(f"{name} ended with {status}:\n{output.end()}")
    output.end()
    print(f"{name}: started, ready, ended with 0", flush=True)


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
