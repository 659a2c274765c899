"""Draws where each percent of a step goes: one bar per phase, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

_COLOURS = {
    "linear": ("#08306b", "#2166ac", "#4292c6", "#7fb6dc", "#bdd7ee"),
    "other": ("#d6604d", "#f4a582", "#762a83", "#c2a5cf", "#1b7837", "#a6dba0", "#bf812d", "#f6d55c", "#888888"),
}
_LEAST_NAMED_PERCENT = 3.5
_PALE = 1.7
"""Sum of red, green and blue, each up to 1, above which black is read better than white."""


def draw(
    by_shape: Mapping[str, Mapping[str, Mapping[str, float]]], milliseconds: Mapping[tuple[str, str], float], out: Path
) -> None:
    """Draw a panel per shape and a bar per phase, which is a mapping from part to percent; the same gives the same."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tandem"
    from matplotlib import colors, pyplot  # after the choice of what it draws on

    num_bars = sum(len(phases) for phases in by_shape.values())
    figure, panels = pyplot.subplots(
        len(by_shape), 1, figsize=(10, 1.3 + 0.5 * num_bars), layout="constrained", squeeze=False
    )
    for axes, (shape, phases) in zip(panels[:, 0], by_shape.items(), strict=True):
        parts = list(next(iter(phases.values())))
        titles = [f"{phase}\n{_in_words(milliseconds[shape, phase])}" for phase in phases]
        left = [0.0] * len(phases)
        for part, colour in zip(parts, _colours(parts), strict=True):
            ink = "black" if sum(colors.to_rgb(colour)) > _PALE else "white"
            percents = [of_phase[part] for of_phase in phases.values()]
            axes.barh(titles, percents, left=left, color=colour, label=part, height=0.72)
            for place, (start, percent) in enumerate(zip(left, percents, strict=True)):
                if percent >= _LEAST_NAMED_PERCENT:
                    axes.text(
                        start + percent / 2, place, f"{percent:.0f}", ha="center", va="center", fontsize=7, color=ink
                    )
            left = [start + percent for start, percent in zip(left, percents, strict=True)]
        axes.set(title=f"shape {shape}", xlim=(0, 100))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("percent of a step")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=8, ncols=7)
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)


def _in_words(milliseconds: float) -> str:
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _colours(parts: Sequence[str]) -> list[str]:
    """Return shades of one colour for linears, and others for what else there is."""
    left = {kind: list(colours) for kind, colours in _COLOURS.items()}
    return [left["linear" if part.startswith("linear") else "other"].pop(0) for part in parts]
