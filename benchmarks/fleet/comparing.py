"""Runs all policies on the same arrivals, and compares each with Tandem by its differences over the seeds."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet.dynamo_policy import Dynamo, dynamo_python
from benchmarks.lib.command import Progress, Sheet, Target
from benchmarks.lib.stats import Figures
from control_plane.simulator.outcome import Budgets, figures
from control_plane.simulator.profiles import FleetProfile
from control_plane.simulator.replay import Estimate, Replay
from control_plane.simulator.simulation import Simulation
from control_plane.simulator.sources import Source
from control_plane.simulator.traces import TraceRequest

OURS = "tandem"
_WARM_UP = 0.4
_COLUMNS = (
    ("p99 TTFT, ms", "ttft_ms.p99", 0),
    ("p50 TTFT, ms", "ttft_ms.p50", 0),
    ("goodput, requests/s", "goodput_per_second", 1),
    ("p99 TPOT, ms", "tpot_ms.p99", 1),
    ("cached", "cached_share", 3),
    ("handed over", "handed_over_share", 2),
)


@dataclass(frozen=True)
class Run:
    """What all policies have in common."""

    fleet: FleetProfile
    source: Source
    budgets: Budgets
    load: float
    num_gateways: int = 1

    def figures_of(self, policy: str, arrivals: Sequence[TraceRequest], seed: int) -> Figures:
        """Return the figures of one run."""
        if policy != "dynamo":
            replay = Replay(self.fleet, self.source, self.budgets, self.load, self.num_gateways, _WARM_UP)
            return replay.run(arrivals, policy, seed)
        python = dynamo_python()
        assert python is not None, "Dynamo is only compared where it is"
        gateways = [Dynamo(self.fleet, arrivals[0].block_tokens, python) for _ in range(self.num_gateways)]
        try:
            answers = Simulation(self.fleet, gateways, arrivals).run()
        finally:
            for gateway in gateways:
                gateway.close()
        return figures(answers, self.budgets, _WARM_UP)


@dataclass(frozen=True)
class Compared:
    """The figures of all policies for one trace and load; each has one value for each seed."""

    title: str
    load: float
    by_policy: dict[str, dict[str, list[float]]]

    def estimate(self, policy: str, name: str) -> Estimate:
        return Estimate.of(self.by_policy[policy][name])

    def gain(self, policy: str, name: str) -> Estimate:
        """Return by how much a policy has more than Tandem: of the differences, seed by seed."""
        pairs = zip(self.by_policy[policy][name], self.by_policy[OURS][name], strict=True)
        return Estimate.of([theirs - ours for theirs, ours in pairs])

    def figures(self) -> Figures:
        """Return the means, flat."""
        prefix = f"{self.title.replace(', ', '_')}.load_{self.load:g}"
        return {
            f"{prefix}.{policy}.{name}": Estimate.of(values).mean
            for policy, by_name in self.by_policy.items()
            for name, values in by_name.items()
        }


class Kept:
    """The figures of runs that are done, each in a file: a comparison that was stopped goes on where it was.

    A file is named after what was run, not after the code: whoever changes a policy deletes its files.
    """

    def __init__(self, folder: Path, size: str) -> None:
        """`size`: what all runs of one comparison have in common, for the names."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._size = size

    def path(self, title: str, load: float, seed: int, policy: str) -> Path:
        return self._folder / f"{title.replace(', ', '_')}.{self._size}.load_{load:g}.seed_{seed}.{policy}.json"

    def read(self, path: Path) -> Figures | None:
        """Return the figures of a run; None if the run is not done."""
        try:
            figures: Figures = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return figures

    def write(self, path: Path, done: Figures) -> None:
        """Keep the figures of a run, whole or not at all."""
        part = path.with_suffix(f".{os.getpid()}.part")  # another process may be at the same run
        part.write_text(json.dumps(done))
        part.replace(path)


def compared(
    title: str, run: Run, policies: Sequence[str], seeds: Sequence[int], progress: Progress, kept: Kept | None = None
) -> Compared:
    """Run each policy with each seed, but those runs that are kept."""
    by_policy: dict[str, dict[str, list[float]]] = {policy: {} for policy in policies}
    for seed in seeds:
        arrivals: Sequence[TraceRequest] = ()
        for policy in policies:
            path = kept.path(title, run.load, seed, policy) if kept is not None else None
            done = kept.read(path) if kept is not None and path is not None else None
            if done is None:
                arrivals = arrivals or run.source.arrivals(run.fleet, run.load, seed)
                done = run.figures_of(policy, arrivals, seed)
                if kept is not None and path is not None:
                    kept.write(path, done)
            for name, value in done.items():
                by_policy[policy].setdefault(name, []).append(value)
        progress(f"{title}, load {run.load:g}, seed {seed}")
    return Compared(title, run.load, by_policy)


def sheets(everything: Sequence[Compared]) -> list[Sheet]:
    """Return a table for each trace and load: mean and interval of each figure."""
    head = ("policy", *(column for column, _, _ in _COLUMNS))
    return [
        Sheet(
            f"{done.title}, load {done.load:g}",
            head,
            [
                (policy, *(_cell(done, policy, name, digits) for _, name, digits in _COLUMNS))
                for policy in done.by_policy
            ],
        )
        for done in everything
    ]


def _cell(done: Compared, policy: str, name: str, digits: int) -> str:
    estimate = done.estimate(policy, name)
    return f"{estimate.mean:,.{digits}f} ± {estimate.half:,.{digits}f}"


def verdicts(everything: Sequence[Compared]) -> list[Target]:
    """Return for each trace and load whether a rival is better than Tandem in p99 TTFT or in goodput."""
    targets = []
    for done in everything:
        if OURS not in done.by_policy:
            continue
        better = [
            f"{policy} ({what})"
            for policy in done.by_policy
            if not policy.startswith(OURS)
            for what, gain in (
                ("p99 TTFT", _negative(done.gain(policy, "ttft_ms.p99"))),
                ("goodput", done.gain(policy, "goodput_per_second")),
            )
            if gain.is_above
        ]
        said = ", ".join(better) or "no rival"
        targets.append(
            Target(f"{done.title}, load {done.load:g}: better than Tandem by its interval: {said}", not better)
        )
    return targets


def _negative(estimate: Estimate) -> Estimate:
    return Estimate(-estimate.mean, estimate.half)
