"""Measures an engine process's memory beside weights and KV pool, and what two workers share.

python -m benchmarks.memory [--quick] [--json FILE] [--markdown FILE]

Real engine processes, as workers start them. The first finds no packed weights and writes them ("cold"), the second
finds them ("warm"). Each answers 32 prompts side by side and one of 512 tokens.

    rest            resident bytes (RSS) - weights - KV pool: interpreter, libraries, buffers, what loading left behind
    peak            the most resident at any time until the engine was ready (VmHWM); pages of mapped files count, the
                    system takes them back when it needs them
    two workers     both on this host, at the same time; PSS counts a page that two share half for each

Of the lean route's weights the pages of the packed file count, which its workers share. The compatibility route's
weights are private: what is not shared is not asked to be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.engine_models import Form, made, weight_bytes
from benchmarks.lib.memory_need import KV_BYTES_PER_WORKER
from benchmarks.lib.stats import Figures, flat
from benchmarks.memory.engine_worker import EngineWorker
from benchmarks.memory.readings import MB, Reading, read
from tandem_engine.settings import EngineConfig, Route

MAX_REST_MB = 400
MAX_WEIGHTS_SHARE = 1.02
"""Of the weights' bytes, the PSS of two workers' together."""
_NUM_THREADS = 2
_ROUTES: tuple[Route, ...] = ("lean", "transformers")
_FORMS: tuple[Form, ...] = ("bf16", "fp32")


@dataclass(frozen=True)
class Variant:
    """What is served, and how."""

    shape: str
    route: Route
    form: Form

    @property
    def name(self) -> str:
        return f"{self.shape}.{'lean' if self.route == 'lean' else 'compat'}_{self.form}"


@dataclass(frozen=True)
class Worker:
    """One engine process, read when it was ready and after its work; `beside` with the other one beside it."""

    name: str
    weights: int
    pool: int
    loaded: Reading
    worked: Reading
    beside: Reading

    def rest(self, reading: Reading) -> int:
        return reading.rss - self.weights - self.pool

    @property
    def peak_rest(self) -> int:
        return self.loaded.peak - self.weights - self.pool


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options = parser("memory", __doc__, "a tiny shape: does it still work?").parse_args(arguments)
    num_threads = 1 if options.quick else _NUM_THREADS
    conditions = {
        "client": "none: engine processes are driven through their sockets",
        "requests": "greedy, random token ids: 32 prompts of 32 tokens side by side, one of 512; 8 tokens each",
        "engines": f"{num_threads} threads; a KV pool of {KV_BYTES_PER_WORKER / MB:.0f} MB each",
        "MB": "1,000,000 bytes",
    }
    variants = [
        Variant(shape, route, form)
        for shape in (["tiny"] if options.quick else ["S", "M"])
        for route in _ROUTES
        for form in _FORMS
    ]

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        measured: dict[str, list[Worker]] = {}
        for variant in variants:
            progress(f"{variant.name}: a worker that packs, and one that finds what it packed")
            measured[variant.name] = await _measure(variant, folder / variant.name, num_threads)
            add(outcome, variant, measured[variant.name])
        outcome.sheets += sheets(measured)

    return run("memory", options, conditions, measure, is_timed=False)


async def _measure(variant: Variant, state: Path, num_threads: int) -> list[Worker]:
    """Start both, give them work, read them."""
    _check_memory(variant)
    model = made(variant.shape, variant.form)
    packed = state / "packed"
    config = EngineConfig(
        str(model),
        device="cpu",
        route=variant.route,
        kv_memory_bytes=KV_BYTES_PER_WORKER,
        num_threads=num_threads,
        state_dir=str(state),
    )
    workers: list[EngineWorker] = []
    read_so_far: list[tuple[Reading, Reading]] = []
    try:
        for _ in range(2):
            workers.append(await EngineWorker.started(config))
            loaded = read(workers[-1].pid, packed)
            await workers[-1].answer(32, 32, 8)
            await workers[-1].answer(1, 512, 8)
            read_so_far.append((loaded, read(workers[-1].pid, packed)))
        beside = [read(worker.pid, packed) for worker in workers]
        pools = [worker.ready.region_bytes for worker in workers]
    finally:
        for worker in workers:
            await worker.end()
    weights = _packed_bytes(packed) or weight_bytes(variant.shape, variant.form)
    return [
        Worker(f"{variant.name}, {name}", weights, pool, *readings, at_last)
        for name, pool, readings, at_last in zip(("cold", "warm"), pools, read_so_far, beside, strict=True)
    ]


def _packed_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _check_memory(variant: Variant) -> None:
    """Raise RuntimeError if two workers, one of them packing, would take more than half of what is available."""
    weights = weight_bytes(variant.shape, variant.form)
    needed = 3 * weights + 2 * (KV_BYTES_PER_WORKER + 2 * MAX_REST_MB * MB)
    if needed > psutil.virtual_memory().available / 2:
        raise RuntimeError(f"{variant.name} needs about {needed / 2**30:.1f} GiB, more than half of what is available")


# -------------------------------------------------------------------------------------------------- pure from here on


def add(outcome: Outcome, variant: Variant, workers: Sequence[Worker]) -> None:
    """Enter one variant's figures and targets."""
    for worker in workers:
        outcome.figures |= flat(worker.name.replace(", ", "."), _figures(worker))
    outcome.figures |= flat(f"{variant.name}.two", _two_figures(workers))
    outcome.targets += targets(variant, workers)


def targets(variant: Variant, workers: Sequence[Worker]) -> list[Target]:
    """Return what the issue asks for."""
    found = [
        Target(
            f"{worker.name}: resident beside weights and KV pool = {most / MB:.0f} MB, at most {MAX_REST_MB} MB",
            most <= MAX_REST_MB * MB,
        )
        for worker in workers
        for most in [max(worker.rest(worker.loaded), worker.rest(worker.worked))]
    ]
    if variant.route == "lean":
        share = _two_figures(workers)["weights_share"]
        text = f"{variant.name}: two workers hold the weights {share:.2f} times (PSS), at most {MAX_WEIGHTS_SHARE:g}"
        found.append(Target(text, 0.98 <= share <= MAX_WEIGHTS_SHARE))
    return found


def sheets(measured: dict[str, list[Worker]]) -> list[Sheet]:
    """Return one table of processes and one of pairs."""
    processes = Sheet(
        "one engine process, MB",
        ("", "weights", "KV pool", "RSS ready", "rest", "RSS worked", "rest", "peak loading", "peak rest"),
        [_row(worker) for workers in measured.values() for worker in workers],
    )
    pairs = Sheet(
        "two workers on one host, MB",
        ("", "weights", "PSS cold", "PSS warm", "of it weights", "of it weights", "weights held"),
        [
            (name, *_mb(workers[0].weights, *(each.beside.pss for each in workers)), *_pair_weights(workers))
            for name, workers in measured.items()
        ],
    )
    return [processes, pairs]


def _figures(worker: Worker) -> Figures:
    return {
        "weights_bytes": worker.weights,
        "pool_bytes": worker.pool,
        "ready_rss_bytes": worker.loaded.rss,
        "ready_rest_bytes": worker.rest(worker.loaded),
        "worked_rss_bytes": worker.worked.rss,
        "worked_rest_bytes": worker.rest(worker.worked),
        "worked_anonymous_bytes": worker.worked.anonymous,
        "peak_bytes": worker.loaded.peak,
        "peak_rest_bytes": worker.peak_rest,
    }


def _two_figures(workers: Sequence[Worker]) -> Figures:
    """`weights_share`: how often the weights are in memory, as far as they lie in mapped files."""
    weights = sum(worker.beside.weights_pss for worker in workers)
    return {
        "pss_bytes": sum(worker.beside.pss for worker in workers),
        "weights_pss_bytes": weights,
        "weights_share": weights / workers[0].weights,
    }


def _row(worker: Worker) -> tuple[str, ...]:
    ready, worked = worker.loaded, worker.worked
    numbers = (worker.weights, worker.pool, ready.rss, worker.rest(ready), worked.rss, worker.rest(worked))
    return (worker.name, *_mb(*numbers, ready.peak, worker.peak_rest))


def _pair_weights(workers: Sequence[Worker]) -> tuple[str, ...]:
    if not any(worker.beside.weights_pss for worker in workers):
        return ("private", "private", "2 times")
    share = _two_figures(workers)["weights_share"]
    return (*_mb(*(worker.beside.weights_pss for worker in workers)), f"{share:.2f} times")


def _mb(*numbers: int) -> tuple[str, ...]:
    return tuple(f"{number / MB:,.0f}" for number in numbers)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
