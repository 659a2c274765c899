"""Measures what a scrape of a large gateway costs: how long its event loop stands still, bytes, processor time.

    python -m benchmarks.scrape [--quick] [--json FILE] [--markdown FILE]

The gateway's registry has 1,000 workers, its request metrics have the series of 50 models after a day of every kind of
outcome. A reader in a process of its own scrapes the real endpoint. Meanwhile the event loop runs
a callback every half millisecond: how late the callback runs is how long the loop stood still.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import percentile
from control_plane.explain.explanation import (
    Explanation,
    Move,
    RouteExplanation,
    Segment,
    Summary,
    UsageExplanation,
)
from control_plane.fleet import fleet_metrics
from control_plane.fleet.registry import WorkerRegistry
from control_plane.request_metrics import RequestMetrics
from control_plane.text.telemetry import GapSampler, GenerationMeter
from tandem.v1 import types_pb2 as pb
from tandem_runtime import log, metrics
from tandem_runtime.metrics_endpoint import MetricsEndpoint

MAX_STRETCH_SECONDS = 0.010
MAX_BYTES = 1 << 20
"""As Prometheus reads them: compressed."""
_TICK_SECONDS = 0.0005
_READER = """
import json, sys, time, urllib.request
url, number, encoding = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sizes, seconds = [], []
sys.stdin.readline()
for _ in range(number):
    started = time.perf_counter()
    request = urllib.request.Request(url, headers={"Accept-Encoding": encoding})
    with urllib.request.urlopen(request, timeout=30) as answer:
        sizes.append(len(answer.read()))
    seconds.append(time.perf_counter() - started)
    time.sleep(0.05)
print(json.dumps([sizes, seconds]))
"""


@dataclass(frozen=True)
class Size:
    num_workers: int
    num_models: int
    num_scrapes: int


FULL = Size(1_000, 50, 100)
QUICK = Size(1_000, 50, 8)


@dataclass(frozen=True)
class Reading:
    """What the loop and the reader saw."""

    lags_seconds: list[float]
    cpu_seconds: float
    """Of the gateway's process, without what it used while nobody scraped."""
    sizes: list[int]
    seconds: list[float]


def fill(size: Size) -> None:
    """Make the fleet and the series of a gateway's metrics. Call after `metrics.configure`."""
    registry = WorkerRegistry(3.0, 5.0)
    roles = itertools.cycle([pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_KV])
    for number, role in zip(range(size.num_workers), roles, strict=False):
        model = "" if role == pb.WORKER_ROLE_KV else _model(number % size.num_models)
        card = pb.ModelCard(model_id=model, context_length=512, block_size=16)
        name = f"worker-{number}"
        info = pb.WorkerInfo(worker_id=name, incarnation=name, role=role, address="127.0.0.1:1", host_id="h", card=card)
        registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY))
    fleet_metrics.export(registry)
    recorder, meter = RequestMetrics(), GenerationMeter()
    for number in range(size.num_models):
        for explanation in _explanations(_model(number)):
            recorder.ended(explanation)
        gaps = GapSampler(meter.gaps, _model(number))
        for _ in range(100):
            gaps.arrived()


def _model(number: int) -> str:
    return f"organisation/model-{number}-instruct"


def _explanations(model: str) -> list[Explanation]:
    """Return requests of every kind that has series of its own."""
    segments = (Segment("queue", "gateway", 0.0, 2.0), Segment("prefill", "prefill", 2.0, 90.0))
    routes = [RouteExplanation(mode, "p", "d", "", {key: 80.0}) for mode, key in _MODES]
    moves = [Move("hand_over", 90.0, "p", "d", "route", 1 << 20, 100, 3.0, each) for each in ("shm", "tcp", "grpc")]
    found = []
    for operation, requested, error, route, move in itertools.product(
        ("chat", "text_completion"), (model, f"{model}-alias"), ("", "Overloaded", "DeadlineExceeded"), routes, moves
    ):
        state, ttft_ms = ("failed", None) if error else ("finished", random.lognormvariate(5.0, 1.0))
        duration_ms = 1_000.0 + (ttft_ms or 0.0)
        summary = Summary("r", "a", model, operation, state, 0, ttft_ms, duration_ms, 200, 90, 50, error=error)  # type: ignore[arg-type]
        usage = UsageExplanation(200, 110, 90, 60, 20, 10, 50)
        found.append(Explanation(summary, requested, segments=segments, route=route, moves=[move], usage=usage))
    return found


_MODES: tuple[tuple[Literal["handed_over", "local"], str], ...] = (("handed_over", "prefill"), ("local", "local"))


class Ticks:
    """A callback of the event loop every half millisecond, and how late each one ran."""

    def __init__(self) -> None:
        self.lags_seconds: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + _TICK_SECONDS
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        self.lags_seconds.append(now - self._due)
        self._due = now + _TICK_SECONDS
        self._timer = self._loop.call_at(self._due, self._tick)

    def stop(self) -> None:
        self._timer.cancel()


async def scraped(url: str, size: Size, encoding: str) -> Reading:
    """Scrape `url` from another process, and watch this one's event loop."""
    command, pipe = (sys.executable, "-c", _READER, url, str(size.num_scrapes), encoding), asyncio.subprocess.PIPE
    reader = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    ticks = Ticks()
    cpu_before, begun = time.process_time(), time.perf_counter()
    printed, _ = await reader.communicate(b"begin\n")
    elapsed, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_before
    ticks.stop()
    if reader.returncode:
        raise RuntimeError(f"the reader ended with {reader.returncode}")
    sizes, seconds = json.loads(printed)
    return Reading(ticks.lags_seconds, cpu_seconds - elapsed * await _idle_share(), sizes, seconds)


async def quiet(seconds: float) -> list[float]:
    """Return how late callbacks run while nobody scrapes."""
    ticks = Ticks()
    await asyncio.sleep(seconds)
    ticks.stop()
    return ticks.lags_seconds


async def _idle_share() -> float:
    """Return the share of a processor that the ticks themselves take."""
    ticks, before, begun = Ticks(), time.process_time(), time.perf_counter()
    await asyncio.sleep(0.5)
    ticks.stop()
    return (time.process_time() - before) / (time.perf_counter() - begun)


async def measure(outcome: Outcome, size: Size, progress: Progress) -> None:
    """Enter what scrapes cost, with and without compression."""
    log.configure("tandem-control", False, level="warning")
    gc.freeze()  # as a service does when it starts
    metrics.configure("tandem-control", None)
    endpoint = MetricsEndpoint("127.0.0.1:0")
    try:
        progress(f"registering {size.num_workers:,} workers and {size.num_models} models")
        fill(size)
        await endpoint.start()
        url = f"http://{endpoint.address}/metrics"
        base = await quiet(3.0 if size.num_scrapes > 20 else 1.0)
        readings = {}
        for encoding in ("gzip", "identity"):
            progress(f"{size.num_scrapes} scrapes, {encoding}")
            readings[encoding] = await scraped(url, size, encoding)
        enter(outcome, size, base, readings)
    finally:
        await endpoint.stop()
        metrics.shutdown()


def enter(outcome: Outcome, size: Size, base: Sequence[float], readings: dict[str, Reading]) -> None:
    """Enter the figures of `readings`, by encoding, beside the lags of a loop that nobody scrapes."""
    rows: Rows = [("nobody scrapes", f"{_ms(max(base))}", f"{_ms(percentile(base, 99))}", "", "", "")]
    for encoding, reading in readings.items():
        longest = max(reading.lags_seconds)
        cpu_ms = 1000 * reading.cpu_seconds / len(reading.sizes)
        figures = {
            "longest_ms": 1000 * longest,
            "p99_ms": 1000 * percentile(reading.lags_seconds, 99),
            "scrape_ms": 1000 * percentile(reading.seconds, 50),
            "cpu_ms": cpu_ms,
            "bytes": float(max(reading.sizes)),
        }
        outcome.figures |= {f"{encoding}_{name}": value for name, value in figures.items()}
        cells = (_ms(longest), _ms(percentile(reading.lags_seconds, 99)), _ms(percentile(reading.seconds, 50)))
        rows.append((encoding, *cells, f"{cpu_ms:.1f}", f"{max(reading.sizes):,}"))
        outcome.targets.append(
            Target(
                f"{encoding}: the event loop stood still for {_ms(longest)} ms at most, at most "
                f"{1000 * MAX_STRETCH_SECONDS:g} ms are allowed",
                longest <= MAX_STRETCH_SECONDS,
            )
        )
    outcome.figures["quiet_longest_ms"] = 1000 * max(base)
    largest = max(readings["gzip"].sizes)
    outcome.targets.append(
        Target(f"{largest:,} bytes compressed at most, {MAX_BYTES:,} are allowed", largest <= MAX_BYTES)
    )
    head = ("", "longest, ms", "p99, ms", "scrape, median ms", "processor ms a scrape", "bytes")
    title = f"A scrape of a gateway with {size.num_workers:,} workers and {size.num_models} models"
    outcome.sheets.append(Sheet(title, head, rows))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a target is missed."""
    chosen = parser("scrape", __doc__ or "", "8 scrapes of each kind").parse_args(arguments)
    size = QUICK if chosen.quick else FULL

    async def measured(outcome: Outcome, folder: Path, progress: Progress) -> None:
        await measure(outcome, size, progress)

    conditions = {"workers": size.num_workers, "models": size.num_models, "scrapes": size.num_scrapes}
    return run("scrape", chosen, conditions, measured)


if __name__ == "__main__":
    sys.exit(main())
