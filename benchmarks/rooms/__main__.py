"""Measures the time to first token of an idle model, alone and while another model of the same gateways is full.

    python -m benchmarks.rooms [--quick] [--json FILE] [--markdown FILE]

Two gateways, each with a core; two models, each of one stand-in worker, so that the cores are not what they share.
Model A's worker runs a few endless requests and refuses all others, which wait in A's room of each gateway. Model B is
asked one request after another: by turns alone and beside the full A, in one run. At the end of each turn beside A
both gateways must be ready, A `full` and B `proven`.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx

from benchmarks.ab.ratios import Ratio, ratio_of_medians
from benchmarks.gateway.processes import ALL_CORES, BESIDE_TWO_SERVERS, TWO_SERVERS_CORES, Processes
from benchmarks.gateway.sse_readers import post
from benchmarks.gateway.stand_in_worker import CONTEXT_LENGTH
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import percentile
from tests.ports import free_ports

MAX_RATIO = 1.10
"""Of B's median time to first token beside A to its value alone."""
_FULL_MODEL, _IDLE_MODEL = "full", "idle"
_NUM_GATEWAYS = 2
_NUM_RUNNING = 4
"""Requests of A that its worker runs for each gateway."""
_PROBE_SECONDS, _VALID_SECONDS = 0.5, 2.0
"""As --probe-interval-seconds and --probe-valid-seconds: A's proof ends within a turn."""
_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05
_TOKEN = "of-the-operator"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    num_turns: int
    num_requests: int
    """Of B at each gateway in each turn."""
    num_waiting: int
    """Of A at each gateway."""


FULL, QUICK = Size(8, 150, 64), Size(2, 20, 16)


@dataclass
class Readings:
    """What one gateway gave."""

    alone: list[float] = field(default_factory=list)
    """Times to first token of B in seconds."""
    beside: list[float] = field(default_factory=list)
    states: list[tuple[bool, str, str]] = field(default_factory=list)
    """At the end of each turn beside A: whether the gateway is ready, and the states of A and B."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options = parser("rooms", __doc__, "two short turns: does it still work?").parse_args(arguments)
    size = QUICK if options.quick else FULL
    conditions = {
        "models": "two, each of a stand-in worker behind the real protocol; tokens at once",
        "full model": f"{_NUM_RUNNING} requests run and {size.num_waiting} wait at each of {_NUM_GATEWAYS} gateways",
        "idle model": f"{size.num_requests} requests at each gateway in each of {size.num_turns} turns, one at a time",
        "gateway": "as `python -m control_plane` starts it; SQLite ledger",
    }

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        os.sched_setaffinity(0, BESIDE_TWO_SERVERS)  # the client is this process
        try:
            enter(outcome, measure_turns(size, folder / "rooms", progress))
        finally:
            os.sched_setaffinity(0, ALL_CORES)

    return run("rooms", options, conditions, measure)


def measure_turns(size: Size, folder: Path, progress: Progress) -> list[Readings]:
    """Return the readings of each gateway."""
    ports = free_ports(_NUM_GATEWAYS)
    variables = {"TANDEM_CONTROL_OPERATOR_TOKEN": _TOKEN}
    readings = [Readings() for _ in ports]
    with Processes(folder, TWO_SERVERS_CORES, BESIDE_TWO_SERVERS, variables=variables) as processes:
        for port in ports:
            processes.gateway(
                *("--listen", f"127.0.0.1:{port}", "--queue-seconds", "600", "--max-waiting", "1000"),
                *("--probe-interval-seconds", f"{_PROBE_SECONDS:g}", "--probe-valid-seconds", f"{_VALID_SECONDS:g}"),
            )
        module = "benchmarks.gateway.stand_in_worker"
        processes.beside("idle", module, "--model", _IDLE_MODEL, "--worker-id", "idle")
        limit = ("--max-running", str(_NUM_RUNNING), "--token-seconds", "0.1")  # a probe is over soon, too
        processes.beside("full", module, "--model", _FULL_MODEL, "--worker-id", "full", *limit)
        with httpx.Client(trust_env=False, timeout=10.0, headers={"Authorization": f"Bearer {_TOKEN}"}) as client:
            gateways = [_Gateway(client, port) for port in ports]
            for gateway in gateways:
                gateway.wait_for(_IDLE_MODEL, "proven")
                gateway.wait_for(_FULL_MODEL, "proven")
                for _ in range(5):
                    gateway.first_token_seconds()
            for turn in range(size.num_turns):
                progress(f"turn {turn + 1} of {size.num_turns}")
                pairs = list(zip(gateways, readings, strict=True))
                if turn % 2:  # each gateway goes first in every second turn
                    pairs.reverse()
                for gateway, each in pairs:
                    each.alone += [gateway.first_token_seconds() for _ in range(size.num_requests)]
                with ExitStack() as stack:
                    for gateway in gateways:
                        stack.enter_context(gateway.full_model(size.num_waiting))
                    for gateway in gateways:
                        gateway.wait_for(_FULL_MODEL, "full")
                    for gateway, each in pairs:
                        each.beside += [gateway.first_token_seconds() for _ in range(size.num_requests)]
                        each.states.append(gateway.states())
                for gateway in gateways:
                    gateway.wait_until_empty()
    return readings


class _Gateway:
    """One gateway, as its clients and its operator see it."""

    def __init__(self, client: httpx.Client, port: int) -> None:
        self._client = client
        self._url = f"http://127.0.0.1:{port}"
        self._address = ("127.0.0.1", port)

    def first_token_seconds(self) -> float:
        """Ask the idle model for two tokens. Return when the first one came; the answer is read to its end."""
        request = _request(_IDLE_MODEL, 2)
        with socket.create_connection(self._address, timeout=_WAIT_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            started = time.perf_counter()
            connection.sendall(request)
            received, first_at = b"", 0.0
            while b"[DONE]" not in received:
                piece = connection.recv(1 << 16)
                received += piece
                if not piece or not received.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"the idle model did not answer: {received[-500:]!r}")
                if not first_at and b'"content":" ' in received:
                    first_at = time.perf_counter()
        return first_at - started

    @contextmanager
    def full_model(self, num_waiting: int) -> Iterator[None]:
        """Keep the full model's worker busy, and so many requests waiting for it."""
        connections: list[socket.socket] = []
        try:
            for _ in range(_NUM_RUNNING + num_waiting):
                connections.append(socket.create_connection(self._address, timeout=_WAIT_SECONDS))
                connections[-1].sendall(_request(_FULL_MODEL, CONTEXT_LENGTH // 2))
            _wait(lambda: self._num_waiting() >= num_waiting, f"{num_waiting} requests wait for {_FULL_MODEL}")
            yield
        finally:
            for connection in connections:
                connection.close()

    def wait_until_empty(self) -> None:
        _wait(lambda: self._num_waiting() == 0, f"nobody waits for {_FULL_MODEL}")

    def wait_for(self, model: str, state: str) -> None:
        _wait(lambda: self._states().get(model) == state, f"{model} is {state}")

    def states(self) -> tuple[bool, str, str]:
        """Return whether the gateway is ready, and the states of the full and the idle model."""
        states = self._states()
        is_ready = self._client.get(f"{self._url}/readyz").status_code == 200
        return is_ready, states.get(_FULL_MODEL, ""), states.get(_IDLE_MODEL, "")

    def _states(self) -> dict[str, str]:
        try:
            states: dict[str, str] = self._client.get(f"{self._url}/readyz").json()["states"]
        except httpx.TransportError:  # nobody listens yet
            return {}
        return states

    def _num_waiting(self) -> int:
        text = self._client.get(f"{self._url}/metrics").text
        found = re.search(rf'^tandem_queue_length\{{[^}}]*model="{_FULL_MODEL}"[^}}]*\}} (\d+)', text, re.MULTILINE)
        return int(found[1]) if found else 0


def enter(outcome: Outcome, readings: Sequence[Readings]) -> None:
    """Enter figures, table and targets."""
    rows: Rows = []
    for number, each in enumerate(readings):
        ratio = _inverse(ratio_of_medians(each.alone, each.beside, is_time=True))
        name = f"gateway_{number}"
        for kind, seconds in (("alone", each.alone), ("beside", each.beside)):
            outcome.figures[f"{name}_{kind}_ttft_ms_p50"] = 1000 * median(seconds)
            outcome.figures[f"{name}_{kind}_ttft_ms_p95"] = 1000 * percentile(seconds, 95)
        outcome.figures[f"{name}_ratio"] = ratio.value
        rows.append(
            (
                f"gateway {number + 1}",
                *(f"{1000 * median(each.alone):.2f} ms", f"{1000 * percentile(each.alone, 95):.2f} ms"),
                *(f"{1000 * median(each.beside):.2f} ms", f"{1000 * percentile(each.beside, 95):.2f} ms"),
                f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
            )
        )
        outcome.targets.append(
            Target(
                f"gateway {number + 1}: B's median time to first token beside a full A is {ratio.value:.3f} times its "
                f"value alone, at most {MAX_RATIO:g}",
                ratio.value <= MAX_RATIO,
            )
        )
        is_ready = all(state == (True, "full", "proven") for state in each.states)
        outcome.targets.append(Target(f"gateway {number + 1} is ready, A full and B proven in every turn", is_ready))
        outcome.figures[f"{name}_turns_ready"] = sum(state == (True, "full", "proven") for state in each.states)
    head = ("", "alone p50", "alone p95", "beside A p50", "beside A p95", "p50 beside / alone (95 %)")
    outcome.sheets.append(Sheet("B's time to first token", head, rows))


def _inverse(ratio: Ratio) -> Ratio:
    """Return new/old from old/new."""
    return Ratio(1 / ratio.value, 1 / ratio.high, 1 / ratio.low)


def _request(model: str, num_tokens: int) -> bytes:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": num_tokens}
    return post("/v1/chat/completions", body)


def _wait(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {_WAIT_SECONDS:g} s: {what}")
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
