"""Draws p99 TTFT and goodput of each policy by load, a file for each trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.fleet.comparing import Compared

_FIGURES = (("ttft_ms.p99", "p99 TTFT, ms"), ("goodput_per_second", "goodput, requests/s"))


def plot(everything: Sequence[Compared], folder: Path) -> list[Path]:
    """Write the files into a folder, and return them. Needs matplotlib, of the extra `dev`."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tandem"  # the same figures give the same file
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, a third of the size of its outlines
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for title in dict.fromkeys(done.title for done in everything):
        of_trace = [done for done in everything if done.title == title]
        figure, axes = pyplot.subplots(1, len(_FIGURES), figsize=(11, 4))
        for axis, (name, label) in zip(axes, _FIGURES, strict=True):
            for policy in of_trace[0].by_policy:
                estimates = [done.estimate(policy, name) for done in of_trace]
                loads = [done.load for done in of_trace]
                axis.errorbar(
                    loads,
                    [each.mean for each in estimates],
                    yerr=[each.half if each.half != float("inf") else 0.0 for each in estimates],
                    label=policy,
                    marker="o",
                    markersize=3,
                    capsize=2,
                )
            axis.set_xlabel("load")
            axis.set_ylabel(label)
        axes[0].set_yscale("log")
        axes[0].legend(fontsize=6)
        figure.suptitle(title)
        figure.tight_layout()
        paths.append(folder / f"fleet-{title.replace(', ', '-')}.svg")
        figure.savefig(paths[-1], metadata={"Date": None})
        pyplot.close(figure)
    return paths
