"""Runs all policies on the same arrivals, and compares each with Tandem by its differences over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def compared(title: str, run: Run, policies: Sequence[str], seeds: Sequence[int], progress: Progress) -> Compared:
    """Run each policy with each seed."""
    by_policy: dict[str, dict[str, list[float]]] = {policy: {} for policy in policies}
    for seed in seeds:
        arrivals = run.source.arrivals(run.fleet, run.load, seed)
        for policy in policies:
            for name, value in run.figures_of(policy, arrivals, seed).items():
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
