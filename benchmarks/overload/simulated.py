"""The same arrivals in the simulator: with the gateways' admission, and with everybody accepted."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.overload.arrivals import Arrivals
from control_plane.admission.budgets import Budget
from control_plane.simulator.admission_line import AdmissionRules
from control_plane.simulator.outcome import Budgets, figures
from control_plane.simulator.policies.admitted import AdmittedTandemPolicy
from control_plane.simulator.policies.policy import Policy
from control_plane.simulator.policies.tandem import TandemPolicy
from control_plane.simulator.profiles import FleetProfile
from control_plane.simulator.simulation import Simulation
from control_plane.simulator.traces import TraceRequest


def all_accepted(profile: FleetProfile, arrivals: Arrivals, num_gateways: int, budgets: Budgets) -> frozenset[int]:
    """Return the requests that meet both budgets if nobody is refused: first come, first served."""
    policies = [TandemPolicy(profile, seed) for seed in range(num_gateways)]
    answers = _simulation(profile, policies, arrivals, None).run()
    return frozenset(answer.request.number for answer in answers if budgets.are_met(answer))


def admitted(
    profile: FleetProfile, arrivals: Arrivals, num_gateways: int, budgets: Budgets, rules: Budget, warm_up: float
) -> dict[str, float]:
    """Return the figures with admission. `warm_up`: the part of the requests, the earliest, that does not count."""
    policies = [AdmittedTandemPolicy(profile, seed, rules.token_seconds) for seed in range(num_gateways)]
    simulation = _simulation(profile, policies, arrivals, AdmissionRules(rules))
    answers = simulation.run()
    return figures(answers, budgets, warm_up, simulation.refused)


def _simulation(
    profile: FleetProfile, policies: Sequence[Policy], arrivals: Arrivals, rules: AdmissionRules | None
) -> Simulation:
    def gateway_of(request: TraceRequest) -> int:
        return arrivals.gateways[request.number]

    return Simulation(profile, policies, arrivals.requests, rules, gateway_of)
