"""How does a test run `tandem worker dev` as a user does, and wait for what it says?"""

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

from tests.examples.workerd import require_workerd

SECONDS = 60.0
"""How long a test waits for a line before it fails."""
CONFIG = {"main": "index.js", "compatibility_date": "2026-11-01"}
ECHO = """
export default {
  async fetch(request, env) {
    return Response.json({ ...env, ASSETS: undefined, version: 1, path: new URL(request.url).pathname });
  },
};
"""


class RunningDev:
    """A `tandem worker dev` and what it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def line_with(self, pattern: str) -> str:
        """Wait for the next line that fits, and return it; fails with all that was printed if it ends before."""
        while True:
            line = self._queue.get(timeout=SECONDS)
            assert line is not None, f"ended without {pattern!r}:\n" + "".join(self.lines)
            if re.search(pattern, line):
                return line

    @property
    def url(self) -> str:
        """Wait until it tells where it listens, which it does once, and return that."""
        found = re.search(r"http://127\.0\.0\.1:\d+", self.line_with(r"  http://127\.0\.0\.1:\d+$"))
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
def worker_dev(folder: Path, *flags: str, environment: Mapping[str, str] | None = None) -> Iterator[RunningDev]:
    """Run it over `folder` on a free port, and end it afterwards."""
    require_workerd()
    command = [sys.executable, "-m", "tandem_client.cli", "worker", "dev", str(folder), "--port", "0", *flags]
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
        process.terminate()  # it takes away what it wrote, which a kill would not
        try:
            process.wait(SECONDS)
        finally:
            process.kill()


def worker(folder: Path, source: str = ECHO, **config: object) -> Path:
    (folder / "index.js").write_text(source)
    (folder / "wrangler.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def get(url: str) -> httpx.Response:
    return httpx.get(url, trust_env=False, timeout=20)
