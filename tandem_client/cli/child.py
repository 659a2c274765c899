"""How does one child process start, end, and what did it last say?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem_client.cli.parent_death import die_with_parent
from tandem_client.cli.plan import ProcessSpec


@dataclass(frozen=True)
class RestartPolicy:
    """When a process that died starts again. Times in seconds."""

    first_delay_seconds: float = 0.5
    max_delay_seconds: float = 10.0
    quick_death_seconds: float = 10.0
    max_quick_deaths: int = 5
    drain_seconds: float = 30.0

    def delay_seconds(self, num_quick_deaths: int) -> float:
        return min(self.max_delay_seconds, float(self.first_delay_seconds * 2 ** max(0, num_quick_deaths - 1)))


class Child:
    """One process and its successors, with the log they share."""

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.num_quick_deaths = 0
        self.gave_up = False
        self.process: asyncio.subprocess.Process | None = None
        self._started = 0.0

    async def start(self) -> None:
        """Start it, in a process group of its own so that Ctrl-C in a terminal reaches only us."""
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *die_with_parent(self.spec.command),
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(self.spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started = time.monotonic()

    async def wait(self, policy: RestartPolicy) -> int:
        """Wait for its end and return the exit code; counts deaths that came quickly, one after another."""
        assert self.process is not None, "start comes before wait"
        code = await self.process.wait()
        self._signal_group(signal.SIGKILL)  # an engine that outlived its front would keep cores and memory
        lived_seconds = time.monotonic() - self._started
        self.num_quick_deaths = self.num_quick_deaths + 1 if lived_seconds < policy.quick_death_seconds else 0
        return code

    async def stop(self, drain_seconds: float) -> bool:
        """Drain it; returns False if it had to be killed."""
        if not self._is_running():
            return True
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), drain_seconds)
        except TimeoutError:
            self._signal_group(signal.SIGKILL)
            await self.process.wait()
            return False
        self._signal_group(signal.SIGKILL)
        return True

    def kill(self) -> None:
        """End it and what it started at once."""
        if self._is_running():
            self._signal_group(signal.SIGKILL)

    def _is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def _signal_group(self, number: signal.Signals) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left: macOS says EPERM
            os.killpg(self.process.pid, number)


def describe_exit(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log that are not empty; a log that was never written has none."""
    if not path.exists():
        return []
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 64 * 1024))
        lines = log.read().decode("utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()][-count:]


def troubles(lines: Sequence[str]) -> list[str]:
    """Return those lines that tell of trouble: warnings, errors, and what is not a log line of ours (a traceback)."""
    calm = ('"level": "info"', '"level": "debug"')
    return [line for line in lines if not any(word in line for word in calm)]


def readable(line: str) -> str:
    """Return a JSON log line as words: the event first, then what went with it; any other line as it is."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or "event" not in record:
        return line
    plumbing = {"event", "level", "timestamp", "logger", "service"}
    details = [f"{key}: {value}" for key, value in record.items() if key not in plumbing and value not in ("", None)]
    return ", ".join([str(record["event"]).replace("_", " "), *details])
