"""The same arrivals in the simulator: with the gateways' admission, and with everybody accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.overload.arrivals import Arrivals
from benchmarks.overload.asking import Asked
from control_plane.admission.budgets import Budget
from control_plane.simulator.admission_line import AdmissionRules
from control_plane.simulator.outcome import Answered, Budgets, Refused, figures
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


def seconds_for(profile: FleetProfile, requests: Sequence[TraceRequest]) -> float:
    """Return when the last of these requests has ended, if one gateway accepts all of them."""
    trace = [replace(request, number=place) for place, request in enumerate(requests)]
    answers = Simulation(profile, [TandemPolicy(profile, 0)], trace).run()
    return max(answer.ended_at for answer in answers)


def admitted(
    profile: FleetProfile, arrivals: Arrivals, num_gateways: int, budgets: Budgets, rules: Budget, warm_up: float
) -> dict[str, float]:
    """Return the figures with admission. `warm_up`: the part of the requests, the earliest, that does not count."""
    answers, refused = _admitted(profile, arrivals, num_gateways, rules)
    return figures(answers, budgets, warm_up, refused)


def asked_of(profile: FleetProfile, arrivals: Arrivals, num_gateways: int, rules: Budget) -> list[Asked]:
    """Return what becomes of the requests with admission, as if a client had asked."""
    answers, refused = _admitted(profile, arrivals, num_gateways, rules)
    pairs = zip(arrivals.requests, arrivals.gateways, strict=True)
    asked = {request.number: Asked(request, gateway, request.arrival) for request, gateway in pairs}
    for answer in answers:
        each = asked[answer.request.number]
        each.status, each.num_tokens = 200, answer.request.num_output_tokens
        each.first_at, each.ended_at = answer.first_token_at, answer.ended_at
    for refusal in refused:
        each = asked[refusal.request.number]
        each.status, each.refused_after = 429, refusal.refused_at - refusal.arrived_at
    return list(asked.values())


def _admitted(
    profile: FleetProfile, arrivals: Arrivals, num_gateways: int, rules: Budget
) -> tuple[list[Answered], list[Refused]]:
    policies = [AdmittedTandemPolicy(profile, seed, rules.token_seconds) for seed in range(num_gateways)]
    simulation = _simulation(profile, policies, arrivals, AdmissionRules(rules))
    return simulation.run(), simulation.refused


def _simulation(
    profile: FleetProfile, policies: Sequence[Policy], arrivals: Arrivals, rules: AdmissionRules | None
) -> Simulation:
    def gateway_of(request: TraceRequest) -> int:
        return arrivals.gateways[request.number]

    return Simulation(profile, policies, arrivals.requests, rules, gateway_of)
