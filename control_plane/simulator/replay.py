"""Runs one trace with several policies and seeds, and compares the figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from control_plane.simulator.outcome import Answered, Budgets, figures
from control_plane.simulator.policies.names import POLICIES
from control_plane.simulator.profiles import FleetProfile
from control_plane.simulator.simulation import Simulation
from control_plane.simulator.sources import Source
from control_plane.simulator.traces import TraceRequest

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

    def run(self, arrivals: Sequence[TraceRequest], policy: str, seed: int) -> list[Answered]:
        """Run one policy."""
        policies = [POLICIES[policy](self.fleet, seed * 1000 + gateway) for gateway in range(self.num_gateways)]
        return Simulation(self.fleet, policies, arrivals).run()


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
            measured = figures(replay.run(arrivals, policy, seed), replay.budgets, replay.warm_up)
            for name, value in measured.items():
                values[policy].setdefault(name, []).append(value)
            progress(f"seed {seed}, {policy}: p99 TTFT {measured['ttft_ms.p99']:.0f} ms")
    return dict(values)
