"""What an explanation shows of a routing decision is what the router compared, a bounded number of workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.router import Router
from control_plane.routing.scoring import NUM_CANDIDATES
from control_plane.routing.session_affinity import SessionRoute
from tests.control_plane.routing.first_choice import FirstChoice
from tests.control_plane.routing.test_router import PREFILL, Harness


def fleet(num_prefills: int, num_decodes: int) -> Harness:
    harness = Harness()
    harness.add_kv()
    for index in range(num_decodes):
        harness.add(f"d{index:02}")
    for index in range(num_prefills):
        speed = 100.0 + index
        harness.add(f"p{index:02}", PREFILL, counters={"prompt_tokens_computed": 1e9 * speed, "step_seconds": 1e9})
    return harness


def test_the_chosen_workers_and_the_runner_up_are_candidates_with_their_estimates() -> None:
    route = fleet(3, 2).router.choose(RoutingRequest("m", 100, 10))
    found = route.explained()
    assert (found.mode, found.prefill, found.decode) == ("handed_over", "p02", route.decode_id)
    chosen = {(candidate.role, candidate.worker) for candidate in found.candidates if candidate.is_chosen}
    assert chosen == {("prefill", "p02"), ("decode", found.decode)} and len(found.candidates) == 5
    assert found.runner_up is not None and not found.runner_up.is_chosen
    best = min((each for each in found.candidates if each.role == "prefill"), key=lambda each: each.predicted_ms)
    assert best.worker == "p02" and best.predicted_ms == pytest.approx(route.predicted_ms["hand_over"])
    assert best.hand_over_ms == pytest.approx(best.predicted_ms - best.queue_ms - best.load_ms - best.compute_ms)
    others = [each.predicted_ms for each in found.candidates if each is not best]
    assert found.runner_up.predicted_ms == min(others)


def test_a_local_route_has_the_hand_over_as_its_runner_up() -> None:
    harness = fleet(1, 1)
    harness.router = Router(harness.registry, "auto", rng=FirstChoice())
    found = harness.router.choose(RoutingRequest("m", 1, 10)).explained()
    assert (found.mode, found.prefill, found.decode) == ("local", "", "d00")
    assert found.runner_up is not None and (found.runner_up.role, found.runner_up.worker) == ("prefill", "p00")
    assert found.runner_up.predicted_ms > found.predicted_ms["local"]
    alone = fleet(0, 1).router.choose(RoutingRequest("m", 1, 10)).explained()
    assert alone.mode == "local" and alone.runner_up is None


def test_of_many_workers_the_soonest_and_the_chosen_ones_are_shown() -> None:
    harness = fleet(40, 40)
    request = RoutingRequest("m", 100, 10, session_id="s")
    found = harness.router.choose(replace(request, session_id="")).explained()
    assert [each.role for each in found.candidates] == ["prefill"] * NUM_CANDIDATES + ["decode"] * NUM_CANDIDATES
    shown = {each.worker for each in found.candidates if each.role == "prefill"}
    assert shown <= {f"p{index:02}" for index in range(33, 40)}, "within 5 % of the soonest"
    assert sum(each.is_chosen for each in found.candidates) == 2
    # A session stays at its worker although others are sooner.
    harness.router.affinity.remember("s", SessionRoute("p30-1", "d39-1"))
    found = harness.router.choose(request).explained()
    assert found.prefill == "p30" and found.decode == "d39"
    assert {each.worker for each in found.candidates if each.is_chosen} == {"p30", "d39"}
