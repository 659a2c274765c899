"""Measures token gaps beside long prompts: one core for each kind of work, or two cores for both.

python -m benchmarks.isolation_itl [--quick] [--json FILE] [--markdown FILE] [--systems NAME,...]
                                   [--ttft-target S] [--itl-target MS] [--seconds S] [--rounds N] [--chunks N,...]

Four streams decode all the while; prompts of 2,048 tokens arrive at even intervals, at 80 % of the rate at which one
core computes them by itself, measured first. The same load goes to the whole Tandem, disaggregated on one core each; to
one aggregated worker with a thread on each core; to llama-server; and to OpenVINO's continuous batching. Those three
first try several chunk sizes and keep the best (the smallest p99 ITL that holds the TTFT target). Then all take turns.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.isolation_itl import stats
from benchmarks.isolation_itl.load import Load, calibrate, observe
from benchmarks.isolation_itl.stats import InTime, Observed
from benchmarks.isolation_itl.systems import DISAGGREGATED, OTHERS, System, World
from benchmarks.lib.command import Outcome, Progress, parser, run
from benchmarks.lib.engine_models import SHAPES
from benchmarks.lib.report import MAX_FOREIGN_CPU_SHARE
from benchmarks.lib.stats import Figures, percentile
from benchmarks.peers import places

_SHARE_OF_RATE = 0.8
_MIN_INTERVAL_SECONDS = 0.25
_PREFILL_CHUNK = 512
_NUM_THREADS = 2


@dataclass(frozen=True)
class Plan:
    """A full run and a quick one differ in nothing else."""

    shape: str
    load: Load
    chunks: tuple[int, ...]
    sweep_seconds: float
    num_rounds: int
    num_calibrations: int
    num_attempts: int
    """A run that was disturbed is repeated until it was this often."""
    has_targets: bool


_FULL = Plan(
    shape="S",
    load=Load(
        vocab_size=SHAPES["S"]["vocab_size"],
        num_streams=4,
        stream_prompt_tokens=128,
        stream_tokens=3900,
        prompt_tokens=2048,
        prompt_answer_tokens=16,
        alone_seconds=10.0,
        loaded_seconds=60.0,
        wait_seconds=120.0,
    ),
    chunks=(32, 64, 128, 256, 512),
    sweep_seconds=20.0,
    num_rounds=3,
    num_calibrations=3,
    num_attempts=2,
    has_targets=True,
)
_QUICK = Plan(
    shape="tiny",
    load=replace(
        _FULL.load,
        vocab_size=SHAPES["tiny"]["vocab_size"],
        stream_prompt_tokens=32,
        prompt_tokens=256,
        alone_seconds=1.0,
        loaded_seconds=2.0,
        wait_seconds=10.0,
    ),
    chunks=(256,),
    sweep_seconds=2.0,
    num_rounds=1,
    num_calibrations=2,
    num_attempts=1,
    has_targets=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options_of = parser("isolation_itl", __doc__, "a tiny shape, a few seconds each: does it still work?")
    names = [system.name for system in (DISAGGREGATED, *OTHERS)]
    options_of.add_argument(
        "--systems", default="", metavar="NAME,...", help=f"of {', '.join(names)}; all if not given"
    )
    options_of.add_argument("--ttft-target", type=float, default=6.0, metavar="S", help="seconds; 6 if not given")
    options_of.add_argument("--itl-target", type=float, default=100.0, metavar="MS", help="100 ms if not given")
    options_of.add_argument("--seconds", type=float, metavar="S", help="of load per run; 60 if not given")
    options_of.add_argument("--rounds", type=int, metavar="N", help="runs of each system; 3 if not given")
    options_of.add_argument(
        "--chunks", default="", metavar="N,...", help="tokens per step to try; 32,...,512 if not given"
    )
    options = options_of.parse_args(arguments)
    wanted = [name for name in options.systems.split(",") if name] or names
    if unknown := sorted(set(wanted) - set(names)):
        raise SystemExit(f"no such system: {', '.join(unknown)}; there are {', '.join(names)}")
    plan = _plan(
        options.quick, options.seconds, options.rounds, [int(each) for each in options.chunks.split(",") if each]
    )
    in_time = InTime(options.ttft_target, options.itl_target / 1000)
    others = [system for system in OTHERS if system.name in wanted and not system.missing]
    missing = {system.name: system.missing for system in OTHERS if system.name in wanted and system.missing}
    cpus = tuple(sorted(os.sched_getaffinity(0))[:_NUM_THREADS])
    conditions = {
        "requests": f"{plan.load.num_streams} streams without end; prompts of {plan.load.prompt_tokens} tokens at even "
        f"intervals, {plan.load.prompt_answer_tokens} tokens of answer each; greedy, float32, nothing cached, "
        "no speculation",
        "cores": f"{cpus}, of which the client and the services take their part",
        "in_time": f"TTFT <= {in_time.ttft_seconds:g} s, ITL <= {options.itl_target:g} ms",
        "peers": places.versions() or "none installed",
        "left out": missing or "nobody",
    }

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        context = plan.load.stream_prompt_tokens + plan.load.stream_tokens + 32
        world = World(plan.shape, cpus, context, folder)
        apart = DISAGGREGATED.name in wanted
        await _Measurement(plan, world, in_time, outcome, progress).run(apart, others)

    return run("isolation_itl", options, conditions, measure)


def _plan(quick: bool, seconds: float | None, num_rounds: int | None, chunks: Sequence[int]) -> Plan:
    plan = _QUICK if quick else _FULL
    load = plan.load if seconds is None else replace(plan.load, loaded_seconds=seconds)
    sweep_seconds = min(plan.sweep_seconds, load.loaded_seconds)
    return replace(
        plan,
        load=load,
        sweep_seconds=sweep_seconds,
        num_rounds=num_rounds or plan.num_rounds,
        chunks=tuple(chunks) or plan.chunks,
    )


class _Measurement:
    """One run of the benchmark, and what it has found so far."""

    def __init__(self, plan: Plan, world: World, in_time: InTime, outcome: Outcome, progress: Progress) -> None:
        self._plan = plan
        self._world = world
        self._in_time = in_time
        self._outcome = outcome
        self._progress = progress
        self._interval = math.inf

    async def run(self, apart: bool, others: Sequence[System]) -> None:
        """Calibrate, choose chunks, then let all systems take turns."""
        await self._calibrate()
        chosen = [(DISAGGREGATED, _PREFILL_CHUNK)] if apart else []
        for system in others:
            if (chunk := await self._best_chunk(system)) is not None:
                chosen.append((system, chunk))
        runs: dict[str, list[Observed]] = {_title(system, chunk): [] for system, chunk in chosen}
        try:
            for turn in range(self._plan.num_rounds):
                for system, chunk in [*chosen[turn % len(chosen) :], *chosen[: turn % len(chosen)]]:
                    observed = await self._observed(system, chunk, self._plan.load, seed=1 + turn)
                    if observed is not None:
                        runs[_title(system, chunk)].append(observed)
        finally:
            self._enter({name: some for name, some in runs.items() if some})

    async def _calibrate(self) -> None:
        """Measure how long one core takes for a long prompt that is alone, on the prefill worker's core."""
        self._progress("measuring one core's prefill rate")
        async with DISAGGREGATED.start(self._world, _PREFILL_CHUNK) as client:
            ttfts = await calibrate(client, self._plan.load, 1 + self._plan.num_calibrations)
        seconds = percentile(ttfts[1:], 50)
        self._interval = max(_MIN_INTERVAL_SECONDS, seconds / _SHARE_OF_RATE)
        num_tokens = self._plan.load.prompt_tokens
        self._outcome.figures |= {
            "one_core.ttft_s": seconds,
            "one_core.prefill_tokens_per_second": num_tokens / seconds,
            "interval_s": self._interval,
        }
        self._progress(f"{num_tokens / seconds:.0f} tokens/s; a prompt every {self._interval:.2f} s")

    async def _best_chunk(self, system: System) -> int | None:
        """Try all chunk sizes for a while; None if the system cannot be measured at all."""
        if len(self._plan.chunks) == 1:
            return self._plan.chunks[0]
        load = replace(self._plan.load, loaded_seconds=self._plan.sweep_seconds, alone_seconds=3.0)
        by_chunk: dict[int, Figures] = {}
        for chunk in self._plan.chunks:
            if (observed := await self._observed(system, chunk, load, seed=100 + chunk)) is not None:
                by_chunk[chunk] = stats.figures([observed], self._in_time)
        if not by_chunk:
            return None
        rows = {_title(system, chunk): found for chunk, found in by_chunk.items()}
        title = f"{system.name}: chunk sizes, {load.loaded_seconds:g} s each"
        self._outcome.sheets += stats.sheets(title, rows)
        best = stats.best_chunk(by_chunk, self._in_time.ttft_seconds)
        self._progress(f"{system.name}: steps of {best} tokens serve it best")
        return best

    async def _observed(self, system: System, chunk: int, load: Load, seed: int) -> Observed | None:
        """Return one run, repeated if other load disturbed it; None if it failed, after printing why."""
        observed: Observed | None = None
        for _ in range(self._plan.num_attempts):
            self._progress(f"{_title(system, chunk)}: {load.loaded_seconds:g} s")
            try:
                async with system.start(self._world, chunk) as client:
                    observed = await observe(client, load, self._interval, seed)
            except (RuntimeError, TimeoutError) as error:
                self._progress(f"{system.name} has failed: {error} {error.__cause__ or ''}")
                return None
            if observed.foreign_cpu_share <= MAX_FOREIGN_CPU_SHARE:
                break
        return observed

    def _enter(self, runs: dict[str, list[Observed]]) -> None:
        by_title = {name: stats.figures(some, self._in_time) for name, some in runs.items()}
        by_name = {name.partition(",")[0]: found for name, found in by_title.items()}
        seconds = self._plan.load.loaded_seconds
        title = f"{self._plan.num_rounds} runs of {seconds:g} s, a prompt every {self._interval:.2f} s"
        self._outcome.sheets += stats.sheets(title, by_title)
        if (price := stats.price_sheet(by_name)) is not None:
            self._outcome.sheets.append(price)
        self._outcome.figures |= stats.all_figures(by_name)
        if self._plan.has_targets and DISAGGREGATED.name in by_name:
            self._outcome.targets.append(stats.target(by_name[DISAGGREGATED.name]))


def _title(system: System, chunk: int) -> str:
    return f"{system.name}, chunk {chunk}" if system.has_chunks else system.name


if __name__ == "__main__":
    sys.exit(main())
