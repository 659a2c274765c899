"""Measures the processor time of one routing decision, by the number of workers, models and cached blocks.

    python -m benchmarks.routing [--quick] [--json FILE] [--markdown FILE]

Half of the workers are of prefill and half of decode, eight on a host, each host with a KV service. Prompts are hashed
beforehand. Half of them have a beginning that some pool has, and belong to a session. After each decision its tokens
are in flight and its calls are watched, until 2 later decisions for each worker, at most 256, were made. Before each
decision one worker reports: what a decision finds prepared is what it finds in a gateway. After each one runs a loop of
plain Python that is always the same: how far its p99 is above its median is the machine's doing, not a decision's. A
quiet moment is a decision between two such loops that took at most 1.1 times the 20th percentile of all of them. The
bar is for all decisions.

Dynamo publishes no time of a decision that we found. Its claim is for the index alone, insertions and look-ups of many
threads: "over 100 million operations per second" (https://docs.dynamo.nvidia.com/dynamo/dev/blog/flash-indexer.md,
February 2026).
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import percentile
from control_plane.block_chain import BlockHashes
from control_plane.compiled_routing import load_routing
from control_plane.fleet.attached import Attached
from control_plane.fleet.call_watch import CallWatch
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.routing.cost_model import InFlightEntry, RoutingRequest
from control_plane.routing.groups import index_space
from control_plane.routing.router import Route, Router
from control_plane.routing.sample_points import SamplePointIndex
from control_plane.routing.session_affinity import SessionRoute
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_runtime import log
from tandem_runtime.garbage import forget_what_is_loaded

MAX_P99_MS = 0.3
DYNAMO = (
    "Dynamo's claim is for its index alone, all threads together: over 100 million operations per second "
    "(https://docs.dynamo.nvidia.com/dynamo/dev/blog/flash-indexer.md); we found no published time of a decision."
)
_GRAIN = 16
_PROMPT_BLOCKS = 128
_WORKERS_PER_HOST = 8
_KNOWN_PROMPTS = 200
_MAX_IN_FLIGHT = 256
_LOOP_TURNS = 1_000
_QUIET = 1.1
"""A loop that takes at most so many times the 20th percentile of all loops counts as undisturbed."""
_PREDICTED_SECONDS = 0.2
"""Of each call until its first token: about what passes here until its end, so that no worker seems slow."""


@dataclass(frozen=True)
class Size:
    """`num_workers` of all models together; `num_blocks` are in the index."""

    num_workers: int
    num_models: int
    num_blocks: int
    num_choices: int

    @property
    def name(self) -> str:
        return f"{self.num_workers}w_{self.num_models}m_{self.num_blocks // 1000}k"


FULL = (
    *(Size(num, 1, 1_000_000, 3_000) for num in (10, 100, 1_000)),
    Size(1_000, 50, 1_000_000, 3_000),
    Size(1_000, 1, 10_000_000, 3_000),
)
QUICK = (Size(10, 1, 20_000, 100), Size(100, 1, 20_000, 100), Size(1_000, 1, 20_000, 30), Size(1_000, 50, 20_000, 30))


class Fleet:
    """A registry of idle workers that have each served some requests, its router, and prompts for it."""

    def __init__(self, size: Size) -> None:
        self._size, self._rng = size, random.Random(1)
        self._registry = WorkerRegistry(1e9, 1e9)
        compiled = load_routing()
        index = SamplePointIndex(max(1_000_000, size.num_blocks), compiled=compiled)
        self.router = Router(self._registry, prefixes=index, rng=random.Random(2), compiled=compiled)
        self._spaces: dict[str, bytes] = {}
        for number in range(-(-size.num_workers // _WORKERS_PER_HOST)):
            self._add_kv_service(number)
        for number in range(size.num_workers):
            self._add_worker(number)
        self.router.health.ask_links(Attached(each.incarnation for each in self._registry.workers()))
        self._known = self._fill()
        self._in_flight: deque[list[tuple[InFlightEntry, CallWatch]]] = deque()

    def request(self, number: int) -> RoutingRequest:
        """Return the next request; each second one goes on with a prompt that is cached somewhere."""
        model_id = f"model-{number % self._size.num_models}"
        hashes, session_id = self._rng.randbytes(16 * _PROMPT_BLOCKS), ""
        if number // self._size.num_models % 2:
            which = self._rng.randrange(len(self._known[model_id]))
            half = 16 * _PROMPT_BLOCKS // 2
            hashes, session_id = self._known[model_id][which][:half] + hashes[half:], f"{model_id}-{which}"
        num_tokens = _GRAIN * _PROMPT_BLOCKS + 1
        return RoutingRequest(model_id, num_tokens, 256, BlockHashes(hashes), _GRAIN, session_id)

    def sent(self, request: RoutingRequest, route: Route) -> None:
        """Count the request at its workers, watch its calls, and end the oldest one."""
        num_tokens = request.num_prompt_tokens
        calls = [self._called(route.decodes[0], num_decode_tokens=num_tokens, num_answers=1)]
        if route.prefill is not None:
            calls.append(self._called(route.prefill, num_prefill_tokens=num_tokens))
        prefill = "" if route.prefill is None else route.prefill.incarnation
        self.router.affinity.remember(request.session_id, SessionRoute(prefill, route.decodes[0].incarnation))
        self._in_flight.append(calls)
        if len(self._in_flight) > min(_MAX_IN_FLIGHT, 2 * self._size.num_workers):
            for entry, watch in self._in_flight.popleft():
                entry.remove()
                watch.output()

    def report(self, number: int) -> None:
        """Take in a worker's report of what it has in flight."""
        worker = self._registry.get(f"w-{number % self._size.num_workers}")
        assert worker is not None, "none has left"
        load, in_flight = pb.LoadReport(), self.router.in_flight
        load.CopyFrom(worker.load)
        load.num_tokens_in_flight = (
            in_flight.decode_tokens if worker.role == pb.WORKER_ROLE_DECODE else in_flight.prefill_tokens
        )[worker.incarnation]
        beat = cp.HeartbeatRequest(worker_id=worker.worker_id, incarnation=worker.incarnation, load=load)
        beat.kv_address = worker.info.kv_address
        self._registry.heartbeat(beat)

    def _called(self, worker: Worker, **numbers: int) -> tuple[InFlightEntry, CallWatch]:
        entry = self.router.in_flight.add(worker.incarnation, **numbers)
        return entry, self.router.health.watch(worker, _PREDICTED_SECONDS)

    def _add_kv_service(self, host: int) -> None:
        info = pb.WorkerInfo(worker_id=f"kv-{host}", incarnation=f"kv-{host}", role=pb.WORKER_ROLE_KV)
        info.host_id, info.address = f"host-{host}", f"10.0.0.{host}:1"
        load = pb.KvServiceLoad(store=pb.KvStoreLoad(total_bytes=1 << 40))
        self._registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY, kv_service=load))

    def _add_worker(self, number: int) -> None:
        model, host = number // 2 % self._size.num_models, number // _WORKERS_PER_HOST
        role = pb.WORKER_ROLE_DECODE if number % 2 else pb.WORKER_ROLE_PREFILL
        card = pb.ModelCard(model_id=f"model-{model}", context_length=131_072, block_size=_GRAIN, takes_spaces=True)
        info = pb.WorkerInfo(worker_id=f"w-{number}", incarnation=f"w-{number}-1", role=role, card=card)
        info.host_id, info.kv_address = f"host-{host}", f"10.0.0.{host}:1"
        pool = pb.KvPool(
            num_total_blocks=30_000, num_free_blocks=30_000, tokens_per_block=_GRAIN, bytes_per_block=2_097_152
        )
        rate = 10_000.0 * self._rng.uniform(0.97, 1.03)
        counters = {
            "prompt_tokens_computed": rate * 10,
            "tokens_generated": 10_000.0,
            "step_seconds": 10.0,
            "steps": 500.0,
        }
        self._registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY, kv=pool, counters=counters))

    def _fill(self) -> dict[str, list[bytes]]:
        """Tell the index what pools have cached; return some of the prompts of each model."""
        known: dict[str, list[bytes]] = {}
        workers = [each for each in self._registry.workers() if each.role != pb.WORKER_ROLE_KV]
        for number in range(self._size.num_blocks // _PROMPT_BLOCKS):
            worker, prompt = workers[number % len(workers)], self._rng.randbytes(16 * _PROMPT_BLOCKS)
            space = index_space(worker)
            self.router.prefixes.learn(BlockHashes(prompt), worker.incarnation, worker.info.host_id, space=space)
            of_model = known.setdefault(worker.info.card.model_id, [])
            if len(of_model) < _KNOWN_PROMPTS:
                of_model.append(prompt)
        return known


def measured(size: Size) -> tuple[list[float], list[float]]:
    """Return the milliseconds of processor time of each decision, and of the loop after each."""
    fleet, found, loops, thresholds = Fleet(size), [], [], gc.get_threshold()
    forget_what_is_loaded()  # as a gateway does when it starts
    try:
        for number in range(size.num_choices + size.num_choices // 10):
            request = fleet.request(number)
            fleet.report(number)
            begun = time.thread_time_ns()
            route = fleet.router.choose(request)
            chosen = time.thread_time_ns()
            _fixed_loop()
            found.append((chosen - begun) / 1e6)
            loops.append((time.thread_time_ns() - chosen) / 1e6)
            fleet.sent(request, route)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    num_warm_ups = size.num_choices // 10
    return found[num_warm_ups:], loops[num_warm_ups:]


def _fixed_loop() -> float:
    """Make and read small objects for about as long as a decision takes."""
    total = 0.0
    for number in range(_LOOP_TURNS):
        values = {"number": number, "total": total}
        total += (number, values)[1]["total"] * 0.5
    return total


def enter(outcome: Outcome, rows: Rows, size: Size, found: Sequence[float], loops: Sequence[float]) -> None:
    """Enter the decisions of one fleet."""
    p50, p99, tail = percentile(found, 50), percentile(found, 99), percentile(loops, 99) / percentile(loops, 50)
    quiet = in_quiet_moments(found, loops)
    in_quiet = "none"
    if quiet:
        quiet_p99, share = percentile(quiet, 99), len(quiet) / len(found)
        outcome.figures |= {f"{size.name}_quiet_p99_ms": quiet_p99, f"{size.name}_quiet_share": share}
        in_quiet = f"{quiet_p99:.3f} of {share:.0%}"
    outcome.figures |= {f"{size.name}_p50_ms": p50, f"{size.name}_p99_ms": p99, f"{size.name}_loop_p99_of_p50": tail}
    cells = (f"{size.num_workers:,}", f"{size.num_models}", f"{size.num_blocks:,}")
    times = (f"{p50:.3f}", f"{p99:.3f}", f"{p99 / p50:.2f}", f"{tail:.2f}", in_quiet)
    rows.append((*cells, *times, f"{1000 / p50:,.0f}"))
    text = f"{size.num_workers:,} workers, {size.num_models} models, {size.num_blocks:,} blocks: p99 {p99:.3f} ms"
    outcome.targets.append(Target(f"{text}, at most {MAX_P99_MS:g} ms are allowed", p99 <= MAX_P99_MS))


def in_quiet_moments(found: Sequence[float], loops: Sequence[float]) -> list[float]:
    """Return the decisions between two undisturbed loops."""
    limit = _QUIET * percentile(loops, 20)
    are_quiet = [each <= limit for each in loops]
    around = zip(found[1:], pairwise(are_quiet), strict=True)
    return [each for each, (before, after) in around if before and after]


async def measure(outcome: Outcome, sizes: Sequence[Size], progress: Progress) -> None:
    """Enter what decisions cost in fleets of all sizes."""
    log.configure("tandem-control", False, level="warning")
    rows: Rows = []
    for size in sizes:
        progress(f"{size.num_workers:,} workers, {size.num_models} models, {size.num_blocks:,} blocks")
        enter(outcome, rows, size, *measured(size))
    times = ("p50, ms", "p99, ms", "p99 / p50", "the same of a fixed loop", "p99, ms, in quiet moments")
    head = ("workers", "models", "blocks", *times, "decisions/s of a core")
    outcome.sheets.append(Sheet("Processor time of Router.choose, beyond hashing", head, rows))
    outcome.notes.append("scored by the compiled library" if load_routing() else "scored by numpy: there is no library")
    outcome.notes.append(DYNAMO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a target is missed."""
    chosen = parser("routing", __doc__ or "", "20,000 blocks, a few decisions").parse_args(arguments)
    sizes = QUICK if chosen.quick else FULL

    async def measured_all(outcome: Outcome, folder: Path, progress: Progress) -> None:
        await measure(outcome, sizes, progress)

    return run("routing", chosen, {"prompt_tokens": _GRAIN * _PROMPT_BLOCKS + 1}, measured_all)


if __name__ == "__main__":
    sys.exit(main())
