"""Measures what a sick worker costs: failed requests, added time to the first token, and how soon it is used again.

    python -m benchmarks.black_holes [--quick] [--json FILE] [--markdown FILE]

A real gateway has three stand-in workers behind the real protocol, each with its first token after 20 ms. Requests come
at a constant rate. For each kind of sickness a fourth worker joins, sick from its first request on. What is measured
begins after the first 10 requests; it is compared with the same fleet without that worker, just before. Then the
worker becomes well, under the same load.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.black_holes.sick_workers import FIRST_TOKEN_SECONDS, Sickness, SickWorker, running
from benchmarks.gateway.processes import Processes
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import percentile
from benchmarks.lib.streaming import ask, new_client
from tandem_engine.demo import MODEL_ID

KINDS: dict[Sickness, str] = {
    "unreachable": "cannot be reached",
    "clock_ahead": "its clock is an hour ahead",
    "refuses_all": "refuses everything",
    "never_answers": "accepts, never answers",
    "ten_times_slow": "ten times as slow",
}
NUM_FIRST = 10
"""Requests in which a gateway may find out that a worker is sick."""
MAX_ADDED_SECONDS = 0.1
MAX_REINSTATED_SECONDS = 10.0
_NUM_WARM = 30
_ANSWER_TOKENS = 4
_POLL_SECONDS = 0.05
_GIVE_UP_SECONDS = 30.0


@dataclass(frozen=True)
class Size:
    num_requests: int
    """Of each measurement."""
    per_second: float


FULL = Size(400, 25.0)
QUICK = Size(60, 25.0)


@dataclass
class Seen:
    """What clients saw of one measurement."""

    ttft_seconds: list[float] = field(default_factory=list)
    num_failed: int = 0

    @property
    def p99(self) -> float:
        return percentile(self.ttft_seconds, 99)


@dataclass(frozen=True)
class Reading:
    """Of one kind of sickness."""

    without: Seen
    beside: Seen
    """With the sick worker, after the first requests."""
    num_failed_first: int
    num_after_first: int
    """Requests that the sick worker got after the first ones, without trials."""
    num_trials: int
    reinstated_seconds: float
    num_failed_later: int

    @property
    def added_seconds(self) -> float:
        return self.beside.p99 - self.without.p99

    @property
    def num_failed(self) -> int:
        return self.num_failed_first + self.beside.num_failed + self.num_failed_later


class Load:
    """Requests at a constant rate, whatever becomes of them."""

    def __init__(self, client: httpx.AsyncClient, per_second: float) -> None:
        self._client = client
        self._seconds = 1.0 / per_second

    async def send(self, number: int) -> Seen:
        """Send so many requests, and wait for their answers."""
        seen = Seen()
        async with asyncio.TaskGroup() as group:
            due = time.perf_counter()
            for _ in range(number):
                group.create_task(self._ask(seen))
                due += self._seconds
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return seen

    async def send_until(self, done: asyncio.Event) -> Seen:
        """Send requests until `done` is set."""
        seen = Seen()
        async with asyncio.TaskGroup() as group:
            while not done.is_set():
                group.create_task(self._ask(seen))
                await asyncio.sleep(self._seconds)
        return seen

    async def _ask(self, seen: Seen) -> None:
        try:
            answer = await ask(self._client, MODEL_ID, "hello", _ANSWER_TOKENS)
        except (RuntimeError, httpx.HTTPError):
            seen.num_failed += 1
        else:
            seen.ttft_seconds.append(answer.token_times[0] - answer.sent)


class World:
    """The gateway, as a client and an operator see it."""

    def __init__(self, client: httpx.AsyncClient, control: list[str], size: Size) -> None:
        self._client = client
        self._control = control
        self._size = size
        self._load = Load(client, size.per_second)

    async def until_health(self, worker_id: str, *wanted: str) -> None:
        """Wait until the gateway shows a worker's health so; raises RuntimeError after 30 s."""
        deadline, found = time.perf_counter() + _GIVE_UP_SECONDS, ""
        while time.perf_counter() < deadline:
            rows = (await self._client.get("/v1/workers")).json()["data"]
            found = next((row["health"] for row in rows if row["id"] == worker_id), "gone")
            if found in wanted:
                return
            await asyncio.sleep(_POLL_SECONDS)
        raise RuntimeError(f"{worker_id} is {found} after {_GIVE_UP_SECONDS:g} s, not {' or '.join(wanted)}")

    async def warm_up(self, worker_ids: Sequence[str]) -> None:
        """Wait until the gateway has streams to these workers, and send some requests."""
        for worker_id in worker_ids:
            await self.until_health(worker_id, "ok")
        await self._load.send(_NUM_WARM)

    async def measure(self, kind: Sickness) -> Reading:
        """Measure without the sick worker, with it, and while it recovers."""
        without = await self._load.send(self._size.num_requests)
        sick = SickWorker(f"sick-{kind}", kind)
        async with running(self._control, sick):
            await self.until_health(sick.info.worker_id, "detached" if kind == "unreachable" else "ok")
            first = await self._load.send(NUM_FIRST)
            num_first = len(sick.submitted)
            beside = await self._load.send(self._size.num_requests)
            later = sick.submitted[num_first:]
            num_trials = sum(each.is_trial for each in later)
            seconds, after = await self._reinstated(sick)
        await self.until_health(sick.info.worker_id, "gone")
        return Reading(
            without, beside, first.num_failed, len(later) - num_trials, num_trials, seconds, after.num_failed
        )

    async def _reinstated(self, sick: SickWorker) -> tuple[float, Seen]:
        """Make the worker well, and return the seconds until it is used again."""
        done = asyncio.Event()
        load = asyncio.create_task(self._load.send_until(done))
        try:
            await sick.be_well()
            began = time.perf_counter()
            await self.until_health(sick.info.worker_id, "ok")
            seconds = time.perf_counter() - began
        finally:
            done.set()
            seen = await load
        return seconds, seen


async def measure(outcome: Outcome, size: Size, folder: Path, progress: Progress) -> None:
    """Enter the figures of every kind; an interrupted run keeps what it has measured."""
    readings: dict[Sickness, Reading] = {}
    try:
        with Processes(folder / "fleet") as processes:
            processes.gateway()
            host, port = processes.address
            well = [SickWorker(f"well-{number}") for number in range(3)]
            async with new_client(f"http://{host}:{port}") as client:
                await _until_listening(client)
                async with running(processes.control_addresses, *well):
                    world = World(client, processes.control_addresses, size)
                    await world.warm_up([worker.info.worker_id for worker in well])
                    for kind, name in KINDS.items():
                        progress(f"a fourth worker: {name}")
                        readings[kind] = await world.measure(kind)
    finally:
        enter(outcome, size, readings)


async def _until_listening(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(_GIVE_UP_SECONDS):
        while True:
            try:
                await client.get("/healthz")
            except httpx.TransportError:
                await asyncio.sleep(_POLL_SECONDS)
            else:
                return


def enter(outcome: Outcome, size: Size, readings: dict[Sickness, Reading]) -> None:
    """Enter one row per kind, flat figures and the targets."""
    rows: Rows = []
    for kind, reading in readings.items():
        outcome.figures |= {
            f"{kind}.num_failed": float(reading.num_failed),
            f"{kind}.added_p99_ttft_ms": 1000 * reading.added_seconds,
            f"{kind}.p99_ttft_ms": 1000 * reading.beside.p99,
            f"{kind}.p99_ttft_without_ms": 1000 * reading.without.p99,
            f"{kind}.num_after_first": float(reading.num_after_first),
            f"{kind}.num_trials": float(reading.num_trials),
            f"{kind}.reinstated_s": reading.reinstated_seconds,
        }
        rows.append(
            (
                KINDS[kind],
                f"{reading.num_failed}",
                _ms(reading.without.p99),
                _ms(reading.beside.p99),
                _ms(reading.added_seconds),
                f"{reading.num_after_first}",
                f"{reading.num_trials}",
                f"{reading.reinstated_seconds:.1f}",
            )
        )
        outcome.targets += _targets(kind, reading)
    head = (
        "the sick worker",
        "failed",
        "p99 without, ms",
        "p99 beside it, ms",
        "added, ms",
        "requests it got",
        "trials",
        "used again, s",
    )
    title = f"{size.num_requests} requests, {size.per_second:g} a second, after the first {NUM_FIRST}"
    outcome.sheets.append(Sheet(title, head, rows))


def _targets(kind: Sickness, reading: Reading) -> list[Target]:
    name = KINDS[kind]
    return [
        Target(f"{name}: {reading.num_failed} requests failed, none may", reading.num_failed == 0),
        Target(
            f"{name}: {_ms(reading.added_seconds)} ms added to the 99th percentile of the time to the first token, at "
            f"most {1000 * MAX_ADDED_SECONDS:g} ms are allowed",
            reading.added_seconds <= MAX_ADDED_SECONDS,
        ),
        Target(
            f"{name}: used again {reading.reinstated_seconds:.1f} s after it was well, at most "
            f"{MAX_REINSTATED_SECONDS:g} s are allowed",
            reading.reinstated_seconds <= MAX_REINSTATED_SECONDS,
        ),
    ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a target is missed."""
    chosen = parser("black_holes", __doc__ or "", f"{QUICK.num_requests} requests a measurement").parse_args(arguments)
    size = QUICK if chosen.quick else FULL

    async def measured(outcome: Outcome, folder: Path, progress: Progress) -> None:
        await measure(outcome, size, folder, progress)

    conditions = {
        "workers": f"three stand-ins and a sick one, first token after {1000 * FIRST_TOKEN_SECONDS:g} ms",
        "requests": f"{size.num_requests} a measurement, {size.per_second:g} a second, {_ANSWER_TOKENS} tokens each",
    }
    return run("black_holes", chosen, conditions, measured)


if __name__ == "__main__":
    sys.exit(main())
