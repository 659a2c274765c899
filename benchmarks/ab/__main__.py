"""Compares two checkouts: one benchmark's figures, old beside new, in alternating runs.

python -m benchmarks.ab --old DIR --new DIR --bench NAME [--runs 5] [--old-arguments "..."] [--json FILE] [--quick]
python -m benchmarks.ab --old DIR --new DIR --bench NAME --turns [N] [--only PATTERN] [--more FILE] [--json FILE]

With `--turns` the processes of both checkouts are up together and take turns of seconds; without it whole runs
alternate. NAME is engine, gateway, handover, isolation_itl, speculation or (by turns) ttft or handover_gap. The ratio
of medians is new/old for rates and old/new for times, so below 1 is worse. An interval wider than 0.10 is no result:
repeat with more runs, or take more turns of the figures that have none (`--only`) beside those of an earlier run
(`--more`).
`--old-arguments` replaces the options of the old side, for a checkout without today's options.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Literal

from benchmarks.ab import turns
from benchmarks.ab.ratios import median_of_ratios, ratio_of_medians
from benchmarks.ab.sides import PARTS, Part, measure
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import Figures, percentile

Runs = Mapping[str, Sequence[Figures]]
"""The figures of all runs, of `old` and of `new`."""
Samples = Mapping[str, tuple[Sequence[float], Sequence[float], bool]]
"""By figure: the values of `old`, those of `new`, and whether they are times."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, save; return 1 if a figure is worse."""
    options = _parser().parse_args(arguments)
    if options.turns is not None:
        return _by_turns(options)
    if options.bench not in PARTS:
        raise SystemExit(f"{options.bench} is measured by turns only; add --turns")
    part = PARTS[options.bench]
    own = ["--quick"] if options.quick else list(part.arguments)
    sides = {
        "old": (options.old.resolve(), own if options.old_arguments is None else shlex.split(options.old_arguments)),
        "new": (options.new.resolve(), own),
    }

    async def compare(outcome: Outcome, folder: Path, progress: Progress) -> None:
        runs: dict[str, list[Figures]] = {name: [] for name in sides}
        try:
            for number in range(1, options.runs + 1):
                for name in ("old", "new") if number % 2 else ("new", "old"):
                    progress(f"run {number} of {options.runs}: {name}")
                    root, side_arguments = sides[name]
                    file = folder / f"{name}-{number}.json"
                    runs[name].append(measure(root, options.bench, side_arguments, file))
        finally:
            enter(outcome, part, runs)

    conditions = {name: f"{root}, {shlex.join(rest) or 'no options'}" for name, (root, rest) in sides.items()}
    return run("ab", options, {**conditions, "benchmark": options.bench, "runs": options.runs}, compare)


def _by_turns(options: argparse.Namespace) -> int:
    if options.bench not in turns.MEASURES:
        raise SystemExit(f"--turns: choose one of {', '.join(turns.MEASURES)}, not {options.bench}")
    measure_turns, is_time = turns.MEASURES[options.bench]
    roots = {"old": options.old.resolve(), "new": options.new.resolve()}
    earlier: list[Figures] = [json.loads(file.read_text())["figures"] for file in options.more]

    async def compare(outcome: Outcome, folder: Path, progress: Progress) -> None:
        values = await measure_turns(roots, turns.Turns(options.turns, options.only), folder, progress)
        samples: Samples = {
            name: (
                [*by_side["old"], *chain.from_iterable(values_of(each, name, "old") for each in earlier)],
                [*by_side["new"], *chain.from_iterable(values_of(each, name, "new") for each in earlier)],
                is_time,
            )
            for name, by_side in values.items()
        }
        _enter_samples(outcome, samples, "turns")
        _enter_pairs(outcome, samples)

    conditions = {"benchmark": options.bench, "turns": options.turns or "the usual number", "only": options.only}
    return run("ab", options, conditions, compare)


def _parser() -> argparse.ArgumentParser:
    options = parser("ab", __doc__, "the benchmark's own quick form on both sides")
    options.add_argument("--old", type=Path, required=True, metavar="DIR", help="the checkout to compare with")
    options.add_argument("--new", type=Path, default=Path(), metavar="DIR", help="the checkout to judge; default: this")
    options.add_argument(
        "--bench", required=True, choices=[*PARTS, *sorted(turns.MEASURES.keys() - PARTS.keys())], help="the benchmark"
    )
    options.add_argument("--runs", type=int, default=5, metavar="N", help="runs of each side (default: 5)")
    options.add_argument(
        "--turns",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="start both sides once and let them take N turns of seconds (default: the benchmark's usual number)",
    )
    options.add_argument(
        "--only", default="", metavar="PATTERN", help="by turns: only figures with this in their names"
    )
    options.add_argument(
        "--more",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="by turns: the JSON of an earlier run of the same commits, whose turns count too",
    )
    options.add_argument("--old-arguments", metavar="TEXT", help="options of the old side instead of the new side's")
    return options


# -------------------------------------------------------------------------------------------------- pure from here on


def enter(outcome: Outcome, part: Part, runs: Runs) -> None:
    """Enter one row, figures and a verdict for each figure that all runs have."""
    old, new = runs["old"], runs["new"]
    if min(len(old), len(new)) < 2:
        return
    shared = [name for name in new[0] if all(name in figures for figures in (*old, *new))]
    samples = {
        name: ([each[name] for each in old], [each[name] for each in new], is_time)
        for name in shared
        if (is_time := part.is_time(name)) is not None
    }
    _enter_samples(outcome, samples, "runs")


def values_of(figures: Figures, name: str, side: str) -> list[float]:
    """Return one side's values of a figure from the figures that a run wrote, in their order."""
    return list(map(figures.__getitem__, takewhile(figures.__contains__, (f"{name}.{side}.{n}" for n in count(1)))))


def _enter_samples(outcome: Outcome, samples: Samples, unit: Literal["runs", "turns"]) -> None:
    """Enter one row, figures and a verdict for each figure; a sample is (old, new, whether they are times)."""
    rows: Rows = []
    for name, (before, after, is_time) in samples.items():
        ratio = ratio_of_medians(before, after, is_time=is_time, are_turns=unit == "turns")
        medians = (f"{percentile(before, 50):.4g}", f"{percentile(after, 50):.4g}")
        interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
        rows.append((name, str(len(after)), *medians, f"{ratio.value:.3f}", interval, ratio.verdict))
        outcome.figures |= {f"{name}.ratio": ratio.value, f"{name}.low": ratio.low, f"{name}.high": ratio.high}
        for side, values in (("old", before), ("new", after)):
            outcome.figures |= {f"{name}.{side}.{number}": value for number, value in enumerate(values, 1)}
        outcome.targets.append(
            Target(f"{name}: {ratio.value:.3f} ({interval}): {ratio.verdict}", ratio.verdict == "not worse")
        )
    head = ("figure", f"{unit} each", "old, median", "new, median", "ratio", "95 % interval", "verdict")
    outcome.sheets.append(Sheet(f"Old beside new, by {unit}", head, rows))


def _enter_pairs(outcome: Outcome, samples: Samples) -> None:
    """Enter the median of the turns' ratios of each figure, and of all figures of one kind; no verdicts."""
    by_kind: dict[str, tuple[list[float], list[float], bool]] = {}
    for name, (before, after, is_time) in samples.items():
        kind = by_kind.setdefault(f"all {name.rpartition('.')[2]}", ([], [], is_time))
        kind[0].extend(before)
        kind[1].extend(after)
    rows: Rows = []
    for name, (before, after, is_time) in {**samples, **by_kind}.items():
        ratio = median_of_ratios(before, after, is_time=is_time)
        rows.append((name, str(len(after)), f"{ratio.value:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}"))
        key = f"{name.replace(' ', '_')}.by_turn"
        outcome.figures |= {f"{key}.ratio": ratio.value, f"{key}.low": ratio.low, f"{key}.high": ratio.high}
    head = ("figure", "turns each", "median of the turns' ratios", "95 % interval")
    outcome.sheets.append(Sheet("Turn by turn: both sides ran within the same seconds", head, rows))


if __name__ == "__main__":
    sys.exit(main())
