"""Compares the engine with the best peers on the same machine, and with the machine's limits.

python -m benchmarks.engine [--quick] [--json FILE] [--markdown FILE] [--plot FILE] [--shapes S,M]
                            [--variants NAME,...] [--peers NAME,...] [--rounds N]

Every engine is a process of its own with the same cores, the same random numbers for weights, and keys and values in
float32. All that fit into memory are loaded at once and take turns. Decoding goes through each engine's own step loop,
greedy, with contexts of about 512 tokens; prefill is one prompt of 512 tokens from an empty cache, one token out.
`make peers` installs what is measured beside ours; what is not there is named and left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.engine import limits, stats
from benchmarks.engine.kinds import OURS, PEERS, EngineKind, available
from benchmarks.engine.limits import Limits
from benchmarks.engine.plot import draw
from benchmarks.engine.stats import Phase, Turns
from benchmarks.engine.turns import Plan, Stage, measure_phases
from benchmarks.lib.command import Outcome, Progress, parser, run
from benchmarks.lib.engine_models import SHAPES, ShapeFacts
from benchmarks.peers import places

_NUM_TOKENS = 512
_NUM_THREADS = 2
PHASES = (Phase(0, _NUM_TOKENS), Phase(1, _NUM_TOKENS), Phase(8, _NUM_TOKENS), Phase(32, _NUM_TOKENS))
_QUICK_PHASES = (Phase(0, 64), Phase(1, 64), Phase(8, 64))
PLANS = {
    "S": Plan(num_rounds=7, num_steps=24, num_prompts=3, num_attempts=3, max_wait_seconds=60.0),
    "M": Plan(num_rounds=5, num_steps=12, num_prompts=1, num_attempts=3, max_wait_seconds=60.0),
    "tiny": Plan(num_rounds=2, num_steps=8, num_prompts=2, num_attempts=1, max_wait_seconds=0.0),
}
_TARGET_SHAPE = "M"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options_of = parser("engine", __doc__, "a tiny shape, few turns: does it still work?")
    options_of.add_argument("--plot", type=Path, metavar="FILE", help="draw the shares of the roofline there, as SVG")
    options_of.add_argument("--shapes", default="", metavar="NAME,...", help="of S, M and tiny; S,M if not given")
    options_of.add_argument("--variants", default=None, metavar="NAME,...", help=f"of ours: {_names(OURS)}")
    options_of.add_argument("--peers", default=None, metavar="NAME,...", help=f"of {_names(PEERS)}; '' for none")
    options_of.add_argument("--rounds", type=int, metavar="N", help="turns of each engine; 7 (S) or 5 (M) if not given")
    options = options_of.parse_args(arguments)
    shapes = _split(options.shapes) or (["tiny"] if options.quick else ["S", "M"])
    if unknown := sorted(set(shapes) - set(SHAPES)):
        raise SystemExit(f"no such shape: {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    ours, missing_ours = available(OURS, None if options.variants is None else _split(options.variants))
    peers, missing_peers = available(PEERS, None if options.peers is None else _split(options.peers))
    kinds = sorted([*ours, *peers], key=lambda kind: kind.is_extra)
    missing = missing_ours | missing_peers
    # Two threads that wait for each other crawl beside anybody else's work; a quick run is to end all the same.
    cpus = tuple(sorted(os.sched_getaffinity(0))[: 1 if options.quick else _NUM_THREADS])
    conditions = {
        "client": "none: each engine's step loop is driven from its own process",
        "requests": f"greedy, random token ids; {len(cpus)} threads on cores {cpus}; keys and values in float32; "
        "no speculation",
        "engines": [kind.name for kind in kinds],
        "peers": places.versions() or "none installed",
        "left out": missing or "nobody",
    }

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        for name, why in missing.items():
            progress(f"{name} is left out: {why}")
        measured: dict[str, dict[str, dict[str, Turns]]] = {}
        for shape in shapes:
            plan = replace(PLANS[shape], num_rounds=options.rounds or PLANS[shape].num_rounds)
            stage = Stage(cpus, folder, progress, partial(limits.measure, cpus, folder, quick=shape == "tiny"))
            await _measure_shape(kinds, shape, plan, _phases(options.quick), stage, outcome, measured)
        if options.plot:
            draw(measured, _phases(options.quick), options.plot)

    return run("engine", options, conditions, measure)


async def _measure_shape(
    kinds: Sequence[EngineKind],
    shape: str,
    plan: Plan,
    phases: Sequence[Phase],
    stage: Stage,
    outcome: Outcome,
    measured: dict[str, dict[str, dict[str, Turns]]],
) -> None:
    """Measure all phases; the tables hold what there is when a run breaks off."""
    by_phase = measured.setdefault(shape, {})
    try:
        async with aclosing(measure_phases(kinds, shape, phases, plan, stage)) as measuring:
            async for phase, turns in measuring:
                by_phase[phase.name] = turns
    finally:
        _add(outcome, shape, by_phase, phases)


def _add(outcome: Outcome, shape: str, by_phase: dict[str, dict[str, Turns]], phases: Sequence[Phase]) -> None:
    """Enter one shape's tables, figures and targets."""
    facts = ShapeFacts(SHAPES[shape])
    weight_bytes = {kind.name: kind.weight_bytes for kind in (*OURS, *PEERS)}
    seen: list[Limits] = []
    for phase in phases:
        for name, turns in by_phase.get(phase.name, {}).items():
            turns.rooflines = [
                phase.limit_tokens_per_second(facts, weight_bytes[name], limits) for limits in turns.limits
            ]
            seen += turns.limits
    ours = [kind.name for kind in OURS]
    outcome.sheets += stats.sheets(shape, by_phase, phases, ours)
    outcome.figures |= stats.figures(shape, by_phase, ours)
    if seen:
        outcome.figures |= stats.limit_figures(shape, seen)
        outcome.sheets.append(stats.limit_sheet(shape, seen))
    if shape == _TARGET_SHAPE:
        found, unmeasured = stats.targets(by_phase)
        outcome.targets += found
        if unmeasured:
            outcome.sheets.append(stats.unmeasured_sheet(unmeasured))


def _phases(quick: bool) -> tuple[Phase, ...]:
    return _QUICK_PHASES if quick else PHASES


def _split(names: str) -> list[str]:
    return [name for name in names.split(",") if name]


def _names(kinds: Sequence[EngineKind]) -> str:
    return ", ".join(kind.name for kind in kinds)


if __name__ == "__main__":
    sys.exit(main())
