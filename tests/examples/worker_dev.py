"""How does a test run `tandem worker dev` as a user does, and wait for what it says?"""

from __future__ import annotations

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

from tests.examples.workerd import require_workerd

SECONDS = 60.0
"""How long a test waits for a line before it fails."""


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
        """Wait until it listens, and return where."""
        found = re.search(r"http://127\.0\.0\.1:\d+", self.line_with("listens on"))
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
    """Run it over `folder` on a free port; what is left of it afterwards is killed."""
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
        process.kill()
        process.wait()
