"""Draws each engine's share of the roofline as bars, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

from benchmarks.engine.stats import ByPhase, Phase

_GROUP_WIDTH = 0.84


def draw(by_shape: Mapping[str, ByPhase], phases: Sequence[Phase], out: Path) -> None:
    """Draw a panel per shape, a group per phase and a bar per engine, its tokens per second above it."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tandem"
    from matplotlib import pyplot  # after the choice of what it draws on

    engines = list(
        dict.fromkeys(name for phases_of in by_shape.values() for each in phases_of.values() for name in each)
    )
    figure, panels = pyplot.subplots(
        len(by_shape), 1, figsize=(10, 3.6 * len(by_shape)), layout="constrained", squeeze=False
    )
    width = _GROUP_WIDTH / max(1, len(engines))
    for axes, (shape, by_phase) in zip(panels[:, 0], by_shape.items(), strict=True):
        done = [phase for phase in phases if phase.name in by_phase]
        for number, name in enumerate(engines):
            for place, phase in enumerate(done):
                if (turns := by_phase[phase.name].get(name)) is None:
                    continue
                x = place + (number - (len(engines) - 1) / 2) * width
                axes.bar(x, turns.share, width * 0.92, color=f"C{number}", label=name if place == 0 else None)
                axes.text(x, turns.share + 0.01, f"{turns.median:.3g}", ha="center", va="bottom", fontsize=6.5)
        axes.set(title=f"shape {shape}", ylabel="share of the roofline", ylim=(0, 1.05))
        axes.set_xticks(range(len(done)), [phase.title for phase in done])
        axes.grid(alpha=0.3, axis="y")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(frameon=False, fontsize=8, ncols=4)
    figure.supxlabel("above each bar: tokens per second, median", fontsize=8)
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)
