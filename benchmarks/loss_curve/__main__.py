"""Plots the loss that training runs of the built-in model logged.

python -m benchmarks.loss_curve RUN [RUN ...] --out docs/demo-model-loss.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

_SMOOTHING = 0.75


@dataclass(frozen=True)
class Curve:
    """What one run logged, in steps' order. `is_cool_down`: the learning rate falls all the way."""

    num_tokens: tuple[int, ...]
    losses: tuple[float, ...]
    is_cool_down: bool

    @property
    def smooth_losses(self) -> list[float]:
        """A moving average that forgets a quarter per entry."""
        smooth = [self.losses[0]]
        for loss in self.losses[1:]:
            smooth.append(_SMOOTHING * smooth[-1] + (1 - _SMOOTHING) * loss)
        return smooth


def read_curve(run: Path) -> Curve:
    """Read a run's loss.jsonl; steps that were logged twice, before and after a crash, count as last logged."""
    records: dict[int, dict[str, Any]] = {}
    for line in (run / "loss.jsonl").read_text().splitlines():
        record = json.loads(line)
        records[record["step"]] = record
    ordered = [records[step] for step in sorted(records)]
    if not ordered:
        raise SystemExit(f"{run}/loss.jsonl holds no entries: has the run taken ten steps?")
    rates = [record["learning_rate"] for record in ordered]
    return Curve(
        tuple(record["num_tokens"] for record in ordered),
        tuple(record["loss"] for record in ordered),
        all(later <= earlier for earlier, later in pairwise(rates)) and rates[-1] < rates[0],
    )


def draw(curves: Sequence[Curve], out: Path) -> None:
    """Draw all curves over the tokens trained on, as SVG; the same input gives the same bytes."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tandem"
    from matplotlib import pyplot  # after the choice of what it draws on

    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for number, curve in enumerate(curves):
        millions = [tokens / 1e6 for tokens in curve.num_tokens]
        colour, label = f"C{number}", "cool-down" if curve.is_cool_down else "constant rate"
        axes.plot(millions, curve.losses, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(millions, curve.smooth_losses, color=colour, linewidth=1.8, label=label)
    axes.set(xlabel="tokens trained on, millions", ylabel="loss of the replies' tokens, nats", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_curve", description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of training runs, in order")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the SVG to write")
    options = parser.parse_args(arguments)
    draw([read_curve(run) for run in options.runs], options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
