"""Compares the percentiles of /metrics with a client's own: times to the first token from 5 ms to 60 s.

    python -m benchmarks.percentiles [--quick] [--json FILE] [--markdown FILE]

A stand-in worker of each median answers after a random time. A client of plain sockets measures from before it sends a
request until the first event of its answer. One scrape of the gateway afterwards gives the other percentiles, by
the formula of Prometheus' histogram_quantile.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway.processes import Processes
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import percentile
from tests.ports import free_port
from tests.scrape import Scrape

MAX_DIFFERENCE = 0.05
QUANTILES = (50, 90, 95, 99)
_METRIC = "gen_ai_server_time_to_first_token_seconds"
_READY_SECONDS = 60.0


@dataclass(frozen=True)
class Load:
    """Requests to one stand-in worker."""

    median_seconds: float
    num_requests: int
    num_at_once: int

    @property
    def model(self) -> str:
        return f"stand-in/{self.median_seconds:g}-seconds"


FULL = (Load(0.008, 600, 2), Load(0.05, 600, 8), Load(0.5, 600, 60), Load(4.0, 400, 200), Load(22.0, 400, 400))
QUICK = (Load(0.008, 60, 2), Load(0.05, 60, 4), Load(0.5, 60, 30))


async def measure(outcome: Outcome, folder: Path, progress: Progress, loads: Sequence[Load]) -> None:
    """Ask each worker, scrape the gateway, and enter both sides' percentiles."""
    with Processes(folder / "percentiles") as processes:
        port = free_port()
        processes.gateway("--metrics-listen", f"127.0.0.1:{port}")
        for number, load in enumerate(loads):
            flags = ("--model", load.model, "--worker-id", f"stand-in-{number}")
            delay = ("--first-token-seconds", str(load.median_seconds))
            processes.beside(f"stand-in-{number}", "benchmarks.gateway.stand_in_worker", *flags, *delay)
        for load in loads:
            await _until_served(processes.address, load)
        # The first requests of a model load its tokenizer: they are no part of the comparison.
        before = _scraped(port)
        times = {}
        for load in loads:
            progress(f"{load.num_requests} requests, first tokens after {load.median_seconds:g} s in the median")
            times[load] = await _ask_all(processes.address, load)
        enter(outcome, times, _scraped(port).since(before))


def enter(outcome: Outcome, times: dict[Load, list[float]], found: Scrape) -> None:
    """Enter a row for each worker. `found` has what the gateway counted meanwhile."""
    rows: Rows = []
    worst = 0.0
    for load, seconds in times.items():
        counted = found.value(f"{_METRIC}_count", gen_ai_response_model=load.model)
        if counted != len(seconds):
            raise RuntimeError(f"{load.model}: {len(seconds)} requests were asked, {counted:g} are counted")
        cells = []
        for quantile in QUANTILES:
            own = percentile(seconds, quantile)
            theirs = found.quantile(_METRIC, quantile / 100, gen_ai_response_model=load.model)
            worst = max(worst, abs(theirs / own - 1))
            outcome.figures[f"{load.median_seconds:g}s.p{quantile}.ratio"] = theirs / own
            cells.append(f"{1000 * theirs:,.1f} / {1000 * own:,.1f} ({theirs / own:.3f})")
        rows.append((f"{load.median_seconds:g} s", f"{len(seconds)}", *cells))
    outcome.figures["worst_difference"] = worst
    head = ("median asked", "requests", *(f"p{quantile}, ms: metrics / client (ratio)" for quantile in QUANTILES))
    outcome.sheets.append(Sheet("Time to the first token", head, rows))
    text = f"percentiles differ by {worst:.1%} at most, at most {MAX_DIFFERENCE:.0%} are allowed"
    outcome.targets.append(Target(text, worst <= MAX_DIFFERENCE))


async def _until_served(address: tuple[str, int], load: Load) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            await _ask_in_turn(address, load, 1)
            return
        except (RuntimeError, OSError) as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{load.model} did not answer within {_READY_SECONDS:g} s: {error}") from error
            await asyncio.sleep(0.2)


async def _ask_all(address: tuple[str, int], load: Load) -> list[float]:
    users = [_ask_in_turn(address, load, load.num_requests // load.num_at_once) for _ in range(load.num_at_once)]
    return [seconds for each in await asyncio.gather(*users) for seconds in each]


async def _ask_in_turn(address: tuple[str, int], load: Load, num_requests: int) -> list[float]:
    """Ask one request after another on one connection; return the seconds from before each to its first event."""
    body = json.dumps({"model": load.model, "prompt": "hello", "stream": True, "max_tokens": 2}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(*address)
    found = []
    try:
        for _ in range(num_requests):
            started = time.perf_counter()
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"{status.decode().strip()}: {(await reader.read(600)).decode(errors='replace')}")
            await reader.readuntil(b"data: ")  # behind pings, which are comments
            found.append(time.perf_counter() - started)
            await reader.readuntil(b"data: [DONE]")
            await reader.readuntil(b"\r\n0\r\n\r\n")
    finally:
        writer.close()
    return found


def _scraped(port: int) -> Scrape:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return Scrape(answer.read())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a target is missed."""
    chosen = parser("percentiles", __doc__ or "", "three medians up to half a second").parse_args(arguments)
    loads = QUICK if chosen.quick else FULL

    async def measured(outcome: Outcome, folder: Path, progress: Progress) -> None:
        await measure(outcome, folder, progress, loads)

    conditions = {"client": "plain sockets that stay open", "sigma": "0.35 of the logarithm"}
    return run("percentiles", chosen, conditions, measured)


if __name__ == "__main__":
    sys.exit(main())
