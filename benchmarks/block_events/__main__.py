"""Measures what block events and heartbeats of 1,000 workers cost a gateway: processor, messages, memory, start.

    python -m benchmarks.block_events [--quick] [--json FILE] [--markdown FILE]

125 KV services with 8 workers each stand in other processes (`hosts.py`), and tell by real gRPC of workers that each
store and evict 500 blocks a second; each worker sends a heartbeat every second. This process is the gateway: the real
reader, the real index and the real registry behind its gRPC server.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.block_events.hosts import BLOCKS_PER_PROMPT, NICENESS, POINTS_PER_PROMPT, PROMPTS_PER_SECOND
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from control_plane.block_events import BlockEventReader
from control_plane.compiled_routing import load_routing
from control_plane.fleet.registration import ControlPlaneService, take_relayed
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.routing.compiled_library import CompiledRouting
from control_plane.routing.sample_points import SamplePointIndex
from tandem.v1 import control_plane_pb2_grpc as cp_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime import log
from tandem_runtime.garbage import forget_what_is_loaded
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.server import GrpcServer

MAX_CPU_SHARE = 0.2
MAX_MESSAGES_PER_SECOND = 1_500
MAX_COMPLETE_SECONDS = 5.0
MAX_INDEX_BYTES = 50e6
_MAX_LAG_SECONDS = 0.05
_COMPLETE_SHARE = 0.98
"""Of the points of all pools: some are always between host and gateway, and the index drops up to 1 %."""
_TICK_SECONDS = 0.001
_SWEEP_SECONDS = 0.25


@dataclass(frozen=True)
class Size:
    num_hosts: int
    workers_per_host: int
    prompts_per_worker: Sequence[int]
    seconds: float
    num_processes: int = 2

    @property
    def num_workers(self) -> int:
        return self.num_hosts * self.workers_per_host


FULL = Size(125, 8, (8, 80), 20.0)
QUICK = Size(25, 8, (8, 80), 3.0)


@dataclass(frozen=True)
class Reading:
    """What a gateway did while it read the events of a fleet with so many blocks."""

    num_blocks: int
    num_points: int
    complete_seconds: float
    longest_snapshot_lag_seconds: float
    cpu_share: float
    messages_per_second: float
    longest_lag_seconds: float
    index_bytes: int


class Lags:
    """How late a callback of every millisecond ran, at most."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._longest = 0.0
        self._due = self._loop.time() + _TICK_SECONDS
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        self._longest = max(self._longest, now - self._due)
        self._due = now + _TICK_SECONDS
        self._timer = self._loop.call_at(self._due, self._tick)

    def stop(self) -> float:
        self._timer.cancel()
        return self._longest


@asynccontextmanager
async def fleet(size: Size, num_prompts: int, control: str) -> AsyncIterator[list[str]]:
    """Start the stand-ins, which report to `control`; yield their addresses."""
    firsts = [size.num_hosts * each // size.num_processes for each in range(size.num_processes + 1)]
    processes = []
    try:
        addresses: list[str] = []
        for first, end in pairwise(firsts):
            command = (sys.executable, "-m", "benchmarks.block_events.hosts", first, end - first)
            arguments = map(str, (*command, size.workers_per_host, num_prompts))
            pipe = asyncio.subprocess.PIPE
            processes.append(await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe, limit=1 << 20))
        for process in processes:
            assert process.stdout is not None, "piped above"
            addresses += json.loads(await process.stdout.readline())
        for process in processes:
            assert process.stdin is not None, "piped above"
            process.stdin.write(f"{control}\n".encode())
        yield addresses
    finally:
        for process in processes:
            assert process.stdin is not None, "piped above"
            process.stdin.close()
        await asyncio.gather(*(process.wait() for process in processes))


@asynccontextmanager
async def serving(registry: WorkerRegistry) -> AsyncIterator[str]:
    """Serve a registry as a gateway does; yield the address."""
    service = ControlPlaneService(registry, KvKeys(), [])

    async def sweep() -> None:
        while True:
            service.ask()
            await asyncio.sleep(_SWEEP_SECONDS)

    def add(server: Any) -> None:
        cp_grpc.add_ControlPlaneServiceServicer_to_server(service, server)

    server = GrpcServer("127.0.0.1:0", add, ["tandem.v1.ControlPlaneService"])
    address, sweeping = await server.start(), asyncio.create_task(sweep())
    yield address
    sweeping.cancel()
    service.close()
    await server.stop(0)


async def read(
    size: Size,
    num_prompts: int,
    registry: WorkerRegistry,
    addresses: Sequence[str],
    compiled: CompiledRouting | None,
) -> Reading:
    """Be a gateway that has just started, until its index is complete and for some seconds more."""
    num_points = size.num_workers * num_prompts * POINTS_PER_PROMPT
    direct: Counter[str] = Counter()

    def heard(worker: Worker) -> None:
        if worker.relayed_at < worker.last_heartbeat:
            direct[worker.worker_id] += 1

    registry.listen_to_loads(heard)
    index = SamplePointIndex(compiled=compiled)
    index.take_memory()  # as a gateway does when it starts
    reader = BlockEventReader(index, registry, "gateway", on_heartbeat=partial(take_relayed, registry))
    lags, begun = Lags(), time.perf_counter()
    for number, address in enumerate(addresses):
        info = pb.WorkerInfo(worker_id=f"kv-{number}", incarnation=f"kv-{number}", role=pb.WORKER_ROLE_KV)
        info.host_id, info.address = f"host-{number}", address
        registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY))
    while len(registry.workers()) < size.num_hosts + size.num_workers:  # noqa: ASYNC110 - the condition depends on other processes
        await asyncio.sleep(0.02)
    while len(index) < _COMPLETE_SHARE * num_points:  # noqa: ASYNC110 - the condition depends on other processes
        await asyncio.sleep(0.02)
    complete, snapshot_lag = time.perf_counter() - begun, lags.stop()
    idle = await _idle_cpu_share(1.0)
    lags, num_before = Lags(), reader.num_batches + direct.total()
    begun, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(size.seconds)
    elapsed = time.perf_counter() - begun
    share = (time.process_time() - cpu) / elapsed
    messages = (reader.num_batches + direct.total() - num_before) / elapsed
    longest = lags.stop()
    await reader.close()
    return Reading(
        size.num_workers * num_prompts * BLOCKS_PER_PROMPT,
        len(index),
        complete,
        snapshot_lag,
        share - idle,
        messages,
        longest,
        index.num_bytes,
    )


async def _idle_cpu_share(seconds: float) -> float:
    """Return what the ticks themselves cost, on a loop of their own thread."""

    async def tick() -> float:
        lags, begun, cpu = Lags(), time.perf_counter(), time.thread_time()
        await asyncio.sleep(seconds)
        lags.stop()
        return (time.thread_time() - cpu) / (time.perf_counter() - begun)

    return await asyncio.to_thread(asyncio.run, tick())


async def measure(outcome: Outcome, size: Size, compiled: CompiledRouting | None, progress: Progress) -> None:
    """Enter what the events cost with each size of the pools."""
    log.configure("tandem-control", False, level="warning")
    forget_what_is_loaded()
    rows: Rows = []
    for num_prompts in size.prompts_per_worker:
        progress(f"starting {size.num_hosts} hosts with {size.workers_per_host} workers of {num_prompts} prompts")
        registry = WorkerRegistry(1e9, 1e9)
        async with serving(registry) as control, fleet(size, num_prompts, control) as addresses:
            progress(f"reading for {size.seconds:g} s")
            enter(outcome, rows, await read(size, num_prompts, registry, addresses, compiled))
    head = ("blocks cached", "points", "complete after, s", "lag then, ms", "core, %", "messages/s", "lag, ms", "MB")
    rate = PROMPTS_PER_SECOND * BLOCKS_PER_PROMPT
    title = f"{size.num_workers:,} workers on {size.num_hosts} hosts, each stores and evicts {rate} blocks a second"
    outcome.sheets.append(Sheet(title, head, rows))


def enter(outcome: Outcome, rows: Rows, reading: Reading) -> None:
    """Enter the figures and targets of one reading."""
    name = f"{reading.num_blocks / 1e6:g}m"
    longest = max(reading.longest_lag_seconds, reading.longest_snapshot_lag_seconds)
    outcome.figures |= {
        f"{name}_complete_seconds": reading.complete_seconds,
        f"{name}_cpu_share": reading.cpu_share,
        f"{name}_messages_per_second": reading.messages_per_second,
        f"{name}_longest_lag_ms": 1000 * longest,
        f"{name}_index_bytes": float(reading.index_bytes),
        f"{name}_points": float(reading.num_points),
    }
    rows.append(
        (
            f"{reading.num_blocks:,}",
            f"{reading.num_points:,}",
            f"{reading.complete_seconds:.2f}",
            f"{1000 * reading.longest_snapshot_lag_seconds:.1f}",
            f"{100 * reading.cpu_share:.1f}",
            f"{reading.messages_per_second:.0f}",
            f"{1000 * reading.longest_lag_seconds:.1f}",
            f"{reading.index_bytes / 1e6:.1f}",
        )
    )
    share = reading.cpu_share
    outcome.targets += [
        Target(f"{name}: {share:.1%} of a core, at most 20 % are allowed", share <= MAX_CPU_SHARE),
        Target(
            f"{name}: {reading.messages_per_second:.0f} messages a second, at most 1,500 are allowed",
            reading.messages_per_second <= MAX_MESSAGES_PER_SECOND,
        ),
        Target(
            f"{name}: complete {reading.complete_seconds:.2f} s after a start, at most 5 s are allowed",
            reading.complete_seconds <= MAX_COMPLETE_SECONDS,
        ),
        Target(f"{name}: {reading.index_bytes / 1e6:.1f} MB, at most 50 MB", reading.index_bytes <= MAX_INDEX_BYTES),
        Target(f"{name}: the loop stood still for {1000 * longest:.1f} ms, at most 50 ms", longest <= _MAX_LAG_SECONDS),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a target is missed."""
    chosen = parser("block_events", __doc__ or "", "200 workers on 25 hosts, 3 seconds").parse_args(arguments)
    size = QUICK if chosen.quick else FULL

    async def measured(outcome: Outcome, folder: Path, progress: Progress) -> None:
        compiled = load_routing()
        outcome.notes.append(f"the index is changed by {'numpy' if compiled is None else 'the compiled library'}")
        await measure(outcome, size, compiled, progress)

    hosts = f"{size.num_hosts}, in processes at nice {NICENESS}: they are other machines"
    conditions = {"hosts": hosts, "workers": size.num_workers, "seconds": size.seconds}
    return run("block_events", chosen, conditions, measured)


if __name__ == "__main__":
    sys.exit(main())
