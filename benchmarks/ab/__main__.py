"""Compares two checkouts: one benchmark's figures, old beside new, in alternating runs.

python -m benchmarks.ab --old DIR --new DIR --bench NAME [--runs 5] [--old-arguments "..."] [--json FILE] [--quick]

NAME is engine, gateway, handover or speculation. The ratio of medians is new/old for rates and old/new for times, so
below 1 is worse. An interval wider than 0.10 is no result: repeat with more runs. `--old-arguments` replaces the
options of the old side, for a checkout without today's options.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.ab.ratios import ratio_of_medians
from benchmarks.ab.sides import PARTS, Part, measure
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import Figures, percentile

Runs = Mapping[str, Sequence[Figures]]
"""The figures of all runs, of `old` and of `new`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, save; return 1 if a figure is worse."""
    options = _parser().parse_args(arguments)
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


def _parser() -> argparse.ArgumentParser:
    options = parser("ab", __doc__, "the benchmark's own quick form on both sides")
    options.add_argument("--old", type=Path, required=True, metavar="DIR", help="the checkout to compare with")
    options.add_argument("--new", type=Path, default=Path(), metavar="DIR", help="the checkout to judge; default: this")
    options.add_argument("--bench", required=True, choices=list(PARTS), help="the benchmark")
    options.add_argument("--runs", type=int, default=5, metavar="N", help="runs of each side (default: 5)")
    options.add_argument("--old-arguments", metavar="TEXT", help="options of the old side instead of the new side's")
    return options


# -------------------------------------------------------------------------------------------------- pure from here on


def enter(outcome: Outcome, part: Part, runs: Runs) -> None:
    """Enter one row, figures and a verdict for each figure that all runs have."""
    old, new = runs["old"], runs["new"]
    if min(len(old), len(new)) < 2:
        return
    shared = [name for name in new[0] if all(name in figures for figures in (*old, *new))]
    rows: Rows = []
    for name in shared:
        if (is_time := part.is_time(name)) is None:
            continue
        before, after = [each[name] for each in old], [each[name] for each in new]
        ratio = ratio_of_medians(before, after, is_time=is_time)
        medians = (f"{percentile(before, 50):.4g}", f"{percentile(after, 50):.4g}")
        interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
        rows.append((name, *medians, f"{ratio.value:.3f}", interval, ratio.verdict))
        outcome.figures |= {f"{name}.ratio": ratio.value, f"{name}.low": ratio.low, f"{name}.high": ratio.high}
        outcome.targets.append(
            Target(f"{name}: {ratio.value:.3f} ({interval}): {ratio.verdict}", ratio.verdict == "not worse")
        )
    head = ("figure", "old, median", "new, median", "ratio", "95 % interval", "verdict")
    outcome.sheets.append(Sheet(f"Old beside new, {len(old)} and {len(new)} runs", head, rows))


if __name__ == "__main__":
    sys.exit(main())
