"""Measures what a refusal costs a gateway whose model is full, beside `GET /healthz` in the same run.

    python -m benchmarks.admission [--quick] [--json FILE] [--markdown FILE]

A gateway has a core; a stand-in worker and the client have another. The worker runs a few endless requests and refuses
all others, which wait until the model's room is full. Then requests of several sizes are asked, which are refused, and
`GET /healthz`, by turns and one at a time. The processor time is that of the gateway's process: its event loop.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gateway.processes import ALL_CORES, OTHER_CORES, Child, Processes
from benchmarks.gateway.sse_readers import post
from benchmarks.gateway.stand_in_worker import CONTEXT_LENGTH
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import percentile
from tandem_engine.demo import MODEL_ID

MAX_P99_MS = 50.0
MAX_CPU_MS = 1.0
"""Of the gateway's process, above `GET /healthz`."""
_SIZES = {"200 characters": 200, "8 kB": 8_000, "60 kB": 60_000}
_HEALTH = "GET /healthz"
_NUM_RUNNING, _NUM_WAITING = 4, 16
_LONGEST_WAIT_SECONDS = 30.0
_POLL_SECONDS = 0.05
_TOKEN = "of-the-operator"


@dataclass(frozen=True)
class Size:
    num_turns: int
    num_requests: int
    """Of each kind in each turn."""


FULL, QUICK = Size(8, 200), Size(2, 100)


@dataclass
class Reading:
    """What one kind of request took."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    """Of the gateway's process, for all of them."""
    retry_after: list[int] = field(default_factory=list)

    @property
    def cpu_ms(self) -> float:
        return 1000.0 * self.cpu_seconds / len(self.seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options = parser("admission", __doc__, "two short turns: does it still work?").parse_args(arguments)
    size = QUICK if options.quick else FULL
    conditions = {
        "model": f"a stand-in worker behind the real protocol; {_NUM_RUNNING} requests run, {_NUM_WAITING} wait",
        "requests": f"{size.num_requests} of each kind in each of {size.num_turns} turns, one at a time",
        "gateway": "as `python -m control_plane` starts it, with --max-waiting; SQLite ledger",
    }

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        os.sched_setaffinity(0, OTHER_CORES)  # the client is this process
        try:
            enter(outcome, measure_kinds(size, folder / "admission", progress))
        finally:
            os.sched_setaffinity(0, ALL_CORES)

    return run("admission", options, conditions, measure)


def measure_kinds(size: Size, folder: Path, progress: Progress) -> dict[str, Reading]:
    """Return what each kind of request took."""
    readings = {name: Reading() for name in (_HEALTH, *_SIZES)}
    with Processes(folder, variables={"TANDEM_CONTROL_OPERATOR_TOKEN": _TOKEN}) as processes:
        gateway = processes.gateway("--max-waiting", str(_NUM_WAITING), "--queue-seconds", "600", "--budgets", "*=0/0")
        processes.stand_in(0.1, "--max-running", str(_NUM_RUNNING))
        filling = _fill(processes.address)
        try:
            client = _Client(processes.address, gateway)
            client.wait_until_full()
            for name in readings:  # the first of each kind imports and compiles
                client.ask(name, 5, Reading())
            for turn in range(size.num_turns):
                progress(f"turn {turn + 1} of {size.num_turns}")
                for name, reading in readings.items():
                    client.ask(name, size.num_requests, reading)
        finally:
            for each in filling:
                each.close()
    return readings


def _fill(address: tuple[str, int]) -> list[socket.socket]:
    """Ask for as many endless answers as run and wait."""
    request = post("/v1/chat/completions", _body(200, CONTEXT_LENGTH // 2))
    connections = []
    for _ in range(_NUM_RUNNING + _NUM_WAITING):
        connections.append(socket.create_connection(address))
        connections[-1].sendall(request)
    return connections


class _Client:
    def __init__(self, address: tuple[str, int], gateway: Child) -> None:
        self._gateway = gateway
        self._connection = http.client.HTTPConnection(*address, timeout=30.0)
        self._bodies = {name: json.dumps(_body(num, 4)).encode() for name, num in _SIZES.items()}

    def wait_until_full(self) -> None:
        deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
        while self._num_waiting() < _NUM_WAITING:
            time.sleep(_POLL_SECONDS)
            if time.monotonic() > deadline:
                raise RuntimeError(f"the model is not full after {_LONGEST_WAIT_SECONDS:g} s")

    def _num_waiting(self) -> int:
        self._connection.request("GET", "/metrics", headers={"authorization": f"Bearer {_TOKEN}"})
        text = self._connection.getresponse().read().decode()
        found = re.search(r"^tandem_queue_length\{[^}]*\} (\d+)", text, re.MULTILINE)
        return int(found[1]) if found else 0

    def ask(self, name: str, number: int, reading: Reading) -> None:
        """Ask for a kind of request so often. Raise RuntimeError for an answer that is no refusal."""
        before = self._gateway.cpu_seconds
        for _ in range(number):
            started = time.perf_counter()
            status, retry_after = self._status(name)
            reading.seconds.append(time.perf_counter() - started)
            if status != (200 if name == _HEALTH else 429):
                raise RuntimeError(f"{name} was answered with {status}")
            if retry_after is not None:
                reading.retry_after.append(int(retry_after))
        reading.cpu_seconds += self._gateway.cpu_seconds - before

    def _status(self, name: str) -> tuple[int, str | None]:
        if name == _HEALTH:
            self._connection.request("GET", "/healthz")
        else:
            headers = {"content-type": "application/json"}
            self._connection.request("POST", "/v1/chat/completions", self._bodies[name], headers)
        response = self._connection.getresponse()
        response.read()
        return response.status, response.headers["retry-after"]


def _body(num_characters: int, max_tokens: int) -> dict[str, object]:
    text = ("to be or not to be " * (num_characters // 19 + 1))[:num_characters]
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL_ID, "messages": messages, "max_tokens": max_tokens, "stream": max_tokens > 4}


def enter(outcome: Outcome, readings: dict[str, Reading]) -> None:
    """Enter figures, table and targets."""
    health_ms = readings[_HEALTH].cpu_ms
    rows: Rows = []
    for name, each in readings.items():
        p50, p99 = (1000 * percentile(each.seconds, percent) for percent in (50, 99))
        above = each.cpu_ms - health_ms
        key = "health" if name == _HEALTH else f"refusal_{_SIZES[name]}"
        outcome.figures |= {f"{key}_ms_p50": p50, f"{key}_ms_p99": p99, f"{key}_cpu_ms": each.cpu_ms}
        waits = f"{min(each.retry_after)} to {max(each.retry_after)} s" if each.retry_after else ""
        rows.append((name, f"{p50:.2f} ms", f"{p99:.2f} ms", f"{each.cpu_ms:.2f} ms", f"{above:+.2f} ms", waits))
        if name != _HEALTH:
            outcome.figures[f"{key}_cpu_above_health_ms"] = above
            outcome.targets += [
                Target(f"a refusal of {name} takes {p99:.1f} ms (p99), at most {MAX_P99_MS:g}", p99 <= MAX_P99_MS),
                Target(
                    f"a refusal of {name} takes {above:.2f} ms of the gateway's processor more than {_HEALTH}, at most "
                    f"{MAX_CPU_MS:g}",
                    above <= MAX_CPU_MS,
                ),
            ]
    head = ("request", "p50", "p99", "processor time", f"above {_HEALTH}", "Retry-After")
    outcome.sheets.append(Sheet("Refusals of a full model", head, rows))


if __name__ == "__main__":
    sys.exit(main())
