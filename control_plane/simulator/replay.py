"""Runs one trace with several policies and seeds, and compares the figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from control_plane.admission.budgets import Budget
from control_plane.simulator.admission_line import AdmissionRules
from control_plane.simulator.fairness import shares, used_seconds
from control_plane.simulator.outcome import Budgets, figures
from control_plane.simulator.policies.admitted import AdmittedTandemPolicy
from control_plane.simulator.policies.names import ADMITTED, POLICIES
from control_plane.simulator.policies.policy import Policy
from control_plane.simulator.profiles import FleetProfile
from control_plane.simulator.simulation import Simulation
from control_plane.simulator.sources import Source
from control_plane.simulator.traces import TraceRequest

_MAX_ACCOUNTS = 10
"""Whose parts are shown: those with the largest."""
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for an interval of 95 %, for 1 to 9 degrees of freedom."""


@dataclass(frozen=True)
class Replay:
    """How a trace is replayed."""

    fleet: FleetProfile
    source: Source
    budgets: Budgets
    load: float | None = None
    """As in `load_of`; None: arrivals as they come."""
    num_gateways: int = 1
    warm_up: float = 0.2
    """Share of the requests, the earliest, that are not counted: caches are cold."""

    def run(self, arrivals: Sequence[TraceRequest], policy: str, seed: int) -> dict[str, float]:
        """Run one policy; return its figures, with the part of the workers' time of each account that requests name."""
        policies = [self._policy(policy, seed * 1000 + gateway) for gateway in range(self.num_gateways)]
        simulation = Simulation(self.fleet, policies, arrivals, self._rules if policy == ADMITTED else None)
        answers = simulation.run()
        of_accounts = shares(used_seconds(answers, self.fleet))
        named = filter(None, of_accounts)
        largest = sorted(named, key=lambda account: (-of_accounts[account], account))[:_MAX_ACCOUNTS]
        return {
            **figures(answers, self.budgets, self.warm_up, simulation.refused),
            **{f"share.{account}": of_accounts[account] for account in largest},
        }

    def _policy(self, name: str, seed: int) -> Policy:
        if name == ADMITTED:
            return AdmittedTandemPolicy(self.fleet, seed, self.budgets.tpot_seconds)
        return POLICIES[name](self.fleet, seed)

    @property
    def _rules(self) -> AdmissionRules:
        return AdmissionRules(Budget(self.budgets.ttft_seconds, self.budgets.tpot_seconds))


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, with the 95 % interval of the mean: `mean` plus or minus `half`."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The interval of one value is infinite."""
        if len(values) < 2:
            return cls(fmean(values), math.inf)
        t = _T_975[min(len(values) - 2, len(_T_975) - 1)]
        return cls(fmean(values), t * stdev(values) / math.sqrt(len(values)))

    @property
    def is_above(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.mean - self.half > 0


Figures = Mapping[str, Sequence[float]]
"""One value for each seed."""


def compare(
    replay: Replay,
    policies: Sequence[str],
    seeds: Sequence[int],
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Figures]:
    """Return the figures of each policy. All policies get the same arrivals for a seed."""
    values: dict[str, dict[str, list[float]]] = {policy: {} for policy in policies}
    for seed in seeds:
        arrivals = replay.source.arrivals(replay.fleet, replay.load, seed)
        for policy in policies:
            measured = replay.run(arrivals, policy, seed)
            for name, value in measured.items():
                values[policy].setdefault(name, []).append(value)
            progress(f"seed {seed}, {policy}: p99 TTFT {measured['ttft_ms.p99']:.0f} ms")
    return dict(values)
