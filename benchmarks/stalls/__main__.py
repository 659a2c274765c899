"""Measures how long requests of each kind hold up the event loop of a gateway with 1,000 workers.

    python -m benchmarks.stalls [--quick] [--json FILE] [--markdown FILE]

A real gateway has a core of its own; 1,000 stand-in workers of one model, eight to a host, grant and answer from
another process. Requests of one kind are sent one after another, and then eight at a time. The gateway's own watchdog
logs each time that a callback of its loop is late by 50 ms, with the processor time of the loop's longest turn
meanwhile; its metrics have how late callbacks are at most. A kind holds the loop up if a turn computed for more than
50 ms.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gateway.processes import Child, Processes
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from tandem_engine.demo import MODEL_ID
from tandem_runtime.loop_lag import STALL_SECONDS

_READY_SECONDS = 180.0
_POLL_SECONDS = 0.5
_AT_ONCE = 8
_HI = [{"role": "user", "content": "hello"}]
_BUCKET = re.compile(r'^tandem_loop_lag_seconds_bucket\{.*le="([^"]+)".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Size:
    num_workers: int
    num_times: int
    """That each kind is sent one after another, and eight at a time."""
    num_words: int
    """Of a long prompt."""


FULL, QUICK = Size(1000, 24, 20_000), Size(50, 8, 2_000)


@dataclass(frozen=True)
class Kind:
    name: str
    method: str
    path: str
    body: Mapping[str, Any] | None = None
    statuses: tuple[int, ...] = (200,)
    num_bytes: int | None = None
    """So many bytes of the answer are read; None: all."""


def kinds(size: Size) -> list[Kind]:
    """Return all kinds of requests; their answers are short."""
    chat = {"model": MODEL_ID, "messages": _HI, "max_tokens": 4}
    long = {"model": MODEL_ID, "prompt": "hello " * size.num_words, "max_tokens": 2}
    many = {"model": MODEL_ID, "prompt": ["hello"] * 32, "max_tokens": 2}
    run_path = f"/client/v4/accounts/benchmark/ai/run/{MODEL_ID}"
    posted = [
        Kind("chat", "POST", "/v1/chat/completions", chat),
        Kind("chat, streamed", "POST", "/v1/chat/completions", {**chat, "stream": True}),
        Kind("chat with 8 choices", "POST", "/v1/chat/completions", {**chat, "n": 8}),
        Kind("AI.run", "POST", run_path, {"prompt": "hello", "max_tokens": 4}),
        Kind("a long prompt", "POST", "/v1/completions", long),
        Kind("32 prompts", "POST", "/v1/completions", many),
        Kind("a wrong body", "POST", "/v1/chat/completions", {"model": MODEL_ID, "messages": 7}, (400,)),
        Kind("an unknown model", "POST", "/v1/chat/completions", {**chat, "model": "nobody's"}, (404,)),
    ]
    paths = ("/", "/v1/models", "/v1/workers", "/v1/requests", "/v1/events", "/v1/metrics/targets", "/metrics")
    probes = [Kind(f"GET {path}", "GET", path) for path in (*paths, "/readyz", "/healthz", "/openapi.json")]
    return [*posted, *probes, Kind("GET /v1/live", "GET", "/v1/live", num_bytes=1)]


class Meter:
    """Reads from a gateway what its loop has done."""

    def __init__(self, gateway: Child, client: httpx.AsyncClient) -> None:
        self._gateway, self._client = gateway, client
        self._num_read = 0
        self._counts: dict[float, float] = {}

    async def seen(self) -> tuple[float, list[dict[str, Any]]]:
        """Return a bound of how late the loop was since the last call, in seconds, and the logged stalls."""
        text = (await self._client.get("/metrics")).raise_for_status().text
        counts = {float(bound): float(count) for bound, count in _BUCKET.findall(text)}
        new = {bound: count - self._counts.get(bound, 0.0) for bound, count in counts.items()}
        self._counts, total = counts, max(new.values(), default=0.0)
        lines = self._gateway.lines()
        stalls = [line for line in map(_parsed, lines[self._num_read :]) if line.get("event") == "loop_stalled"]
        self._num_read = len(lines)
        return min(bound for bound, count in new.items() if count >= total), stalls


def _parsed(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
    return found


async def measure(size: Size, outcome: Outcome, folder: Path, progress: Progress) -> None:
    """Enter what each kind does."""
    rows: Rows = []
    with Processes(folder / "processes") as processes:
        gateway = processes.gateway()
        processes.beside("workers", "benchmarks.stalls.many_workers", "--num-workers", str(size.num_workers))
        host, port = processes.address
        limits = httpx.Limits(max_connections=None)
        base = f"http://{host}:{port}"
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60.0, limits=limits) as client:
            progress(f"{size.num_workers:,} workers register")
            await _registered(client, size.num_workers, gateway)
            meter = Meter(gateway, client)
            await meter.seen()
            await asyncio.sleep(3.0)
            rows.append(_entered(outcome, "nothing", 0.0, *await meter.seen()))
            for kind in kinds(size):
                progress(kind.name)
                seconds = await _sent(client, kind, size.num_times)
                rows.append(_entered(outcome, kind.name, seconds, *await meter.seen()))
        gateway.check()
    head = ("requests", "seconds each", "late at most, ms", "stalls", "longest turn of a stall, ms", "it was in")
    outcome.sheets.append(
        Sheet(f"{size.num_workers:,} workers; {size.num_times} requests, and as many by eights", head, rows)
    )


async def _registered(client: httpx.AsyncClient, num_workers: int, gateway: Child) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        gateway.check()
        try:
            workers = (await client.get("/v1/workers")).raise_for_status().json()["data"]
            if len(workers) >= num_workers and (await client.get(f"/readyz?model={MODEL_ID}")).is_success:
                return
        except httpx.TransportError:
            pass  # nobody listens yet
        if time.monotonic() > deadline:
            raise RuntimeError(f"{num_workers} workers were not registered within {_READY_SECONDS:g} s")
        await asyncio.sleep(_POLL_SECONDS)


async def _sent(client: httpx.AsyncClient, kind: Kind, num_times: int) -> float:
    """Send requests one after another, and then by eights; return the mean seconds of the former."""
    begun = time.perf_counter()
    for _ in range(num_times):
        await _one(client, kind)
    seconds = (time.perf_counter() - begun) / num_times
    for _ in range(0, num_times, _AT_ONCE):
        await asyncio.gather(*(_one(client, kind) for _ in range(_AT_ONCE)))
    return seconds


async def _one(client: httpx.AsyncClient, kind: Kind) -> None:
    async with client.stream(kind.method, kind.path, json=kind.body) as answer:
        num_bytes = 0
        async for part in answer.aiter_bytes():
            num_bytes += len(part)
            if kind.num_bytes is not None and num_bytes >= kind.num_bytes:
                break
    if answer.status_code not in kind.statuses:
        raise RuntimeError(f"{kind.name}: {answer.status_code}, expected {kind.statuses}")


def _entered(
    outcome: Outcome, name: str, seconds: float, late: float, stalls: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    longest = max(stalls, key=lambda each: float(each["cpu_seconds"]), default=None)
    cpu_seconds = 0.0 if longest is None else float(longest["cpu_seconds"])
    frames = "" if longest is None else " < ".join(longest["frames"][:2])
    short = re.sub(r"\W+", "_", name).strip("_").lower()
    outcome.figures |= {
        f"{short}.seconds": seconds,
        f"{short}.late_ms": 1000 * min(late, 1e3),
        f"{short}.num_stalls": float(len(stalls)),
        f"{short}.longest_turn_ms": 1000 * cpu_seconds,
    }
    text = f"{name}: no turn of the loop computed for more than {1000 * STALL_SECONDS:g} ms"
    outcome.targets.append(
        Target(f"{text} ({len(stalls)} stalls, {1000 * cpu_seconds:.0f} ms)", cpu_seconds <= STALL_SECONDS)
    )
    turn = f"{1000 * cpu_seconds:.0f}" if stalls else ""
    return name, f"{seconds:.4f}", f"{1000 * late:g}", str(len(stalls)), turn, frames


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a kind of request holds the loop up."""
    chosen = parser("stalls", __doc__ or "", "50 workers, and a third of the requests").parse_args(arguments)
    size = QUICK if chosen.quick else FULL

    async def measured(outcome: Outcome, folder: Path, progress: Progress) -> None:
        await measure(size, outcome, folder, progress)

    conditions = {
        "client": "on the workers' core; the gateway has a core of its own",
        "workers": f"{size.num_workers:,}, in a process at one address, each with a stream, grants and heartbeats",
        "long prompt": f"{size.num_words:,} words",
    }
    return run("stalls", chosen, conditions, measured)


if __name__ == "__main__":
    sys.exit(main())
