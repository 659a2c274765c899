"""Runs the units' processes as the units say: `python -m tests.install systemd`.

There is no systemd as process 1 here. Each ExecStart runs with the unit's variables, user, folders, read-only root,
system calls, address families and limits (tests/install/confined.py); the order of start and stop is the target's. Not
in force: MemoryMax, DevicePolicy, PrivateUsers, and what ProtectKernel... and Restrict... do beyond that. Needs root
(namespaces), bubblewrap, iproute2, systemd-analyze.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.lib.namespaces import NetworkHost
from infra.systemd.units import FOLDER, Unit, read, variables_of
from tests.install.sandbox import Running, Sandbox, base_variables, kernels, owned_folder, wait_until
from tests.install.streams import Load, first_token
from tests.install.told import all_held, told

_USER = 64_123
_NUM_STREAMS = 16
_MAX_TOKENS = 600
_URL = "http://127.0.0.1:8642"
_START = ("tandem-kv", "tandem-prefill@1", "tandem-decode@1", "tandem-decode@2", "tandem-gateway")
"""In the order of the units' After= and Before=; the target stops in the reverse order."""
_PYTHON = "/opt/tandem/bin/python"


def main() -> int:
    """Run all; return 0 if all held, 1 if something did not, or a program is missing."""
    return all_held(_run, "bwrap", "ip", "nsenter", "setpriv", "systemd-analyze")


def _run() -> None:
    """Raises AssertionError with what did not hold."""
    with kernels() as (read_only, variables), _machine(read_only, variables) as machine:
        began = time.monotonic()
        with told("systemctl start tandem.target"):
            machine.start()
        seconds = first_token(machine.network.run, _URL)
        print(f"    first token after {time.monotonic() - began:.1f} s, {seconds:.2f} s of it for the request")
        for name in ("tandem-decode@2", "tandem-prefill@1", "tandem-kv"):
            with told(f"systemctl restart {name} under {_NUM_STREAMS} streams"):
                machine.restart_under_load(name)
        with told("a wrong setting and a revoked process end with codes that are not restarted"):
            machine.refuse()
        with told(f"systemctl stop tandem.target under {_NUM_STREAMS} streams"):
            machine.stop_under_load()


class _Machine:
    """A machine with Tandem's files, and the units that run on it."""

    def __init__(self, folder: Path, read_only: Mapping[str, Path], variables: Mapping[str, str]) -> None:
        self.network = NetworkHost("machine", "127.0.0.1")
        self.network.ip("link set lo up")
        self._folder = folder
        self._read_only = read_only
        self._variables = variables
        environment = {**os.environ, "DESTDIR": str(folder / "root")}
        subprocess.run([str(FOLDER / "install.sh")], env=environment, check=True)
        self._settings = folder / "root" / "etc" / "tandem"
        toml = self._settings / "tandem.toml"  # as tandem.tmpfiles.conf has it
        shutil.chown(toml, 0, _USER)
        toml.chmod(0o640)
        self._folders = {
            "/var/lib/tandem": owned_folder(folder / "state", _USER, _USER, 0o700),
            "/run/tandem": owned_folder(folder / "sockets", _USER, _USER, 0o700),
        }
        self.running: dict[str, Running] = {}

    def unit(self, name: str) -> tuple[Unit, Path]:
        stem, _, instance = name.partition("@")
        path = self._folder / "root/etc/systemd/system" / f"{stem}{'@' if instance else ''}.service"
        return read(path, instance), path

    def launch(self, name: str, **more: str) -> Running:
        """Run a unit's command as the unit says."""
        unit, path = self.unit(name)
        temporary = self._folder / f"tmp-{name}-{time.monotonic_ns()}"
        sandbox = Sandbox(
            name=name,
            network=self.network,
            user=_USER,
            log=self._folder / f"{name}.log",
            environment={**base_variables(), "HOME": "/var/lib/tandem", **self._all_variables(unit), **more},
            writable={**self._folders, "/tmp": owned_folder(temporary, 0, 0, 0o1777)},
            read_only={**self._read_only, "/etc/tandem/tandem.toml": self._settings / "tandem.toml", "/unit": path},
        )
        self.running[name] = sandbox.start([_PYTHON, "-m", "tests.install.confined", "/unit", *unit.command])
        return self.running[name]

    def _all_variables(self, unit: Unit) -> dict[str, str]:
        found = {**self._variables, **unit.variables}
        for file, may_be_missing in unit.files:
            path = self._settings / Path(file).name
            if path.exists():
                found |= variables_of(path.read_text())
            else:
                assert may_be_missing, f"{unit.name}: there is no {file}"
        return found

    def start(self) -> None:
        for name in _START:
            self.launch(name)
        wait_until(self._is_ready, 120, "readiness")

    def _is_ready(self) -> bool:
        for name, running in self.running.items():
            assert running.exit_code is None, f"{name} ended with {running.exit_code}: {running.tail()}"
        return self.network.run(_is_ready)

    def restart_under_load(self, name: str) -> None:
        load = self._load()
        code = self._stop(name)
        failures = load.failures()
        assert (code, failures) == (0, []), f"{code}, {failures}: {self.running[name].tail()}"
        self.launch(name)
        wait_until(self._is_ready, 60, f"readiness after {name}")
        first_token(self.network.run, _URL)

    def stop_under_load(self) -> None:
        load = self._load()
        codes = {name: self._stop(name) for name in reversed(_START)}
        failures = load.failures()
        print(f"    exit codes {codes}, {sum(s.num_tokens for s in load.streams)} tokens, failed streams: {failures}")
        assert failures == []
        assert set(codes.values()) == {0}

    def refuse(self) -> None:
        """A restart changes nothing after these: systemd does not try."""
        code = self.launch("tandem-decode@3", TANDEM_DECODE_DRAIN_SECONDS="soon").wait(60)
        assert code == 2, self.running["tandem-decode@3"].tail()
        known = self._members()
        kept = self.launch("tandem-decode@3")
        wait_until(lambda: len(self._members()) > len(known), 60, "a new member")
        [new] = self._members() - known
        self._fleet("revoke", new)
        assert kept.wait(60) == 78, kept.tail()
        assert {"2", "78"} == set(self.unit("tandem-decode@3")[0].one("RestartPreventExitStatus").split())
        del self.running["tandem-decode@3"]

    def _members(self) -> set[str]:
        return {each["id"] for each in json.loads(self._fleet("list", "--json"))["members"]}

    def _fleet(self, *arguments: str) -> str:
        done = self.running["tandem-gateway"].execute([_PYTHON, "-m", "control_plane", "fleet", *arguments])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _stop(self, name: str) -> int | None:
        """Send SIGTERM to the main process (KillMode=mixed); None after TimeoutStopSec."""
        began = time.monotonic()
        self.running[name].terminate()
        code = self.running[name].wait(self.unit(name)[0].stop_seconds)
        print(f"    {name} ended with {code} after {time.monotonic() - began:.1f} s", flush=True)
        return code

    def _load(self) -> Load:
        load = self.network.run(lambda: Load([_URL] * _NUM_STREAMS, "", _MAX_TOKENS))
        load.began()
        return load

    def close(self) -> None:
        for running in self.running.values():
            running.kill()
        self.network.close()


@contextmanager
def _machine(read_only: Mapping[str, Path], variables: Mapping[str, str]) -> Iterator[_Machine]:
    with tempfile.TemporaryDirectory(prefix="tandem-units-") as name:
        Path(name).chmod(0o755)
        machine = _Machine(Path(name), read_only, variables)
        try:
            yield machine
        finally:
            machine.close()


def _is_ready() -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", 8642, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
