"""Runs `tandem dev` as a user does, over the wranglers in tests/clients, and waits for the lines that it prints."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

SECONDS = 120.0
"""How long a test waits for a line before it fails."""
TOOLS = [Path(__file__).parents[1] / "clients" / name for name in ("node20", "node22")]
"""The oldest and the newest wrangler that are tested, each with its Node.js."""
CONFIG = {"main": "index.js", "compatibility_date": "2026-04-01"}
ECHO = """
export default {
  async fetch(request, env) {
    return Response.json({ ...env, ASSETS: undefined, version: 1, path: new URL(request.url).pathname });
  },
};
"""


class RunningDev:
    """A `tandem dev` and the lines that it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def line_with(self, pattern: str) -> str:
        """Wait for the next line that matches, and return it; fails with all lines if there is none in time."""
        while True:
            try:
                line = self._queue.get(timeout=SECONDS)
            except queue.Empty:
                line = None
            assert line is not None, f"ended, or waited {SECONDS:g} s, without {pattern!r}:\n" + "".join(self.lines)
            if re.search(pattern, line):
                return line

    @property
    def url(self) -> str:
        """Wait until the Worker is ready, which is printed once, and return its URL."""
        found = re.search(r"http://127\.0\.0\.1:\d+", self.line_with(r"^ready +http://127\.0\.0\.1:\d+$"))
        assert found is not None
        return found[0]

    def end(self) -> int:
        """Press Ctrl-C, wait, and return the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(SECONDS)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(None)


@contextmanager
def running_dev(folder: Path, *flags: str, environment: Mapping[str, str] | None = None) -> Iterator[RunningDev]:
    """Run `tandem dev` over `folder` on a free port, and end it afterwards."""
    command = [sys.executable, "-m", "tandem_client.cli", "dev", str(folder), "--port", "0", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
    )
    running = RunningDev(process)
    try:
        yield running
    finally:
        process.terminate()  # a kill would leave the bundle's folder
        try:
            process.wait(SECONDS)
        finally:
            process.kill()


def install(folder: Path, tools: Path) -> Path:
    """Give `folder` the packages of `tools` as npm would; skips where `make services` has not installed them."""
    packages = tools / "node_modules"
    if not (packages / "wrangler").exists():
        reason = f"wrangler is not installed: {packages} is missing; run `make services`"
        if os.environ.get("TANDEM_REQUIRE_SERVICES") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    (folder / "node_modules").mkdir(parents=True)
    for package in packages.iterdir():
        (folder / "node_modules" / package.name).symlink_to(package)
    return folder


def worker(folder: Path, source: str = ECHO, **config: object) -> Path:
    (folder / "index.js").write_text(source)
    (folder / "wrangler.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def get(url: str) -> httpx.Response:
    return httpx.get(url, trust_env=False, timeout=30)
