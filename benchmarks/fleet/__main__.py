"""Compares Tandem's router with the rules of others, and with Dynamo's own router, on a simulated fleet of H100s.

python -m benchmarks.fleet [--quick] [--trace FILE ...] [--keep FOLDER] [--json FILE] [--svg FOLDER] [--validate]

Traces are those given, in Mooncake's form or Azure's, with arrivals as they are and jittered, and a synthetic one of
agents. The rates of the workers are a roofline (control_plane/simulator/profiles.py). All policies get the same
arrivals. A rival is better or worse if the 95 % interval of its difference to `tandem`, over the seeds, is on one side
of 0. `--validate` compares the simulator with real processes instead.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from benchmarks.fleet.comparing import Compared, Kept, Run, compared, sheets, verdicts
from benchmarks.fleet.dynamo_policy import VARIABLE, dynamo_python
from benchmarks.fleet.plots import plot
from benchmarks.fleet.validation import validate
from benchmarks.lib import command
from benchmarks.lib.command import Outcome, Progress
from control_plane.simulator.outcome import Budgets
from control_plane.simulator.policies.names import POLICIES
from control_plane.simulator.profiles import h100_fleet
from control_plane.simulator.sources import MadeUpAgents, Source, TracePart
from control_plane.simulator.traces import read_trace

_LOADS = (0.5, 0.7, 0.9, 1.1)
_QUICK_LOADS = (0.9,)
_JITTER_SECONDS = 3.0
"""Mooncake's arrivals are multiples of 3 s."""
_BUDGETS = Budgets(ttft_seconds=2.0, tpot_seconds=0.05)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options = _parser().parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if options.validate:
        conditions = {"requests": "greedy; random words, so no prefix is shared", "client": "on the same cores"}
        return command.run("fleet", options, conditions, functools.partial(validate, options.quick))
    measure = functools.partial(_measure, options)
    return command.run("fleet", options, _conditions(), measure, is_timed=False)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "fleet", __doc__ or "", "8 + 8 workers, one load, two seeds and 400 requests a run: half a minute"
    )
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE", help="may be repeated")
    parser.add_argument("--workers", type=int, metavar="N", help="of each role [64; with --quick 8]")
    parser.add_argument("--requests", type=int, metavar="N", help="of each run [4000; with --quick 400]")
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of each policy [5; with --quick 2]")
    parser.add_argument("--loads", type=float, nargs="+", metavar="X", help="1.0: what the fleet can just serve")
    parser.add_argument("--policies", nargs="+", metavar="NAME", help=f"of {', '.join(POLICIES)} and dynamo [all]")
    parser.add_argument("--gateways", type=int, default=1, metavar="N", help="that route without talking [1]")
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="draw p99 TTFT and goodput by load there")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep each run's figures there, and do not run it again"
    )
    parser.add_argument("--validate", action="store_true", help="only the simulator beside 2 + 2 real processes")
    return parser


def _conditions() -> dict[str, object]:
    return {
        "client": "simulated",
        "requests": "of the traces",
        "budgets": f"TTFT {_BUDGETS.ttft_seconds:g} s, {1000 * _BUDGETS.tpot_seconds:g} ms per output token",
        "dynamo": "ai-dynamo-runtime, index of its own decisions" if dynamo_python() else f"left out: no {VARIABLE}",
    }


async def _measure(options: argparse.Namespace, outcome: Outcome, folder: Path, progress: Progress) -> None:
    quick = options.quick
    num_workers = options.workers or (8 if quick else 64)
    num_requests = options.requests or (400 if quick else 4000)
    loads = options.loads or (_QUICK_LOADS if quick else _LOADS)
    names = options.policies or [*POLICIES, *(["dynamo"] if dynamo_python() else [])]
    if unknown := set(names) - {*POLICIES, "dynamo"}:
        raise SystemExit(f"no policy {min(unknown)!r}; there are {', '.join(POLICIES)} and dynamo")
    size = f"{num_workers}x{num_requests}x{options.gateways}"
    kept = Kept(options.keep, size) if options.keep is not None else None
    everything: list[Compared] = []
    for title, source in _sources(options.trace, num_requests):
        for load in loads:
            run = Run(h100_fleet(num_workers, num_workers), source, _BUDGETS, load, options.gateways)
            seeds = range(options.seeds or (2 if quick else 5))
            done = compared(title, run, names, seeds, progress, kept)
            everything.append(done)
            outcome.figures |= done.figures()
    outcome.sheets += sheets(everything)
    outcome.targets += verdicts(everything)
    outcome.notes.append(
        f"{num_workers} + {num_workers} simulated workers, {num_requests} requests a run, the first two fifths of them "
        "not counted"
    )
    if options.svg:
        outcome.notes += [f"drawn: {path.name}" for path in plot(everything, options.svg)]


def _sources(paths: Sequence[Path], num_requests: int) -> list[tuple[str, Source]]:
    sources: list[tuple[str, Source]] = []
    for path in paths:
        trace = read_trace(path)
        sources.append((path.stem, TracePart(trace, num_requests)))
        sources.append((f"{path.stem}, jittered", TracePart(trace, num_requests, _JITTER_SECONDS)))
    return [*sources, ("agents", MadeUpAgents(num_requests))]


if __name__ == "__main__":
    sys.exit(main())
