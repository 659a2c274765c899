"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from control_plane.simulator.policies.admitted import AdmittedTandemPolicy
from control_plane.simulator.policies.policy import Policy
from control_plane.simulator.policies.rivals import (
    DynamoCost,
    LeastRequests,
    LlmD,
    PowerOfTwo,
    PrefixHash,
    RoundRobin,
)
from control_plane.simulator.policies.tandem import TandemPolicy
from control_plane.simulator.profiles import FleetProfile

ADMITTED = "tandem_admission"
"""Tandem's router behind its admission, with the budgets of the run: the only policy that refuses."""

POLICIES: dict[str, Callable[[FleetProfile, int], Policy]] = {
    "tandem": TandemPolicy,
    ADMITTED: AdmittedTandemPolicy,
    "tandem_always": partial(TandemPolicy, hand_over="always"),
    "tandem_never": partial(TandemPolicy, hand_over="never"),
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "power_of_two": PowerOfTwo,
    "prefix_hash": PrefixHash,
    "llm_d": LlmD,
    "dynamo_cost": DynamoCost,
    "dynamo_cost_half": partial(DynamoCost, overlap_weight=0.5),
    "dynamo_cost_double": partial(DynamoCost, overlap_weight=2.0),
}
"""Each is called with the fleet and a seed. `always` and `never` say when prompts are handed over to decode."""
OURS = frozenset(name for name in POLICIES if name.startswith("tandem"))
