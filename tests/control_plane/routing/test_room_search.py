"""A prefill worker without room is passed by for another one, unless that takes longer than the wait."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.room_search import Lack, find_room
from control_plane.routing.router import Route, Router
from tandem_runtime.errors import Overloaded
from tests.control_plane.routing.first_choice import FirstChoice
from tests.control_plane.routing.test_router import PREFILL, Harness

REQUEST = RoutingRequest("m", 100, 10)


class Fleet(Harness):
    """Workers of which some are full."""

    def __init__(self, local_prefill: Literal["auto", "never"] = "never") -> None:
        super().__init__()
        self.router = Router(self.registry, local_prefill, rng=FirstChoice())
        self.full: set[str] = set()
        self.looks: list[tuple[str, str, bool]] = []
        self.add_kv()

    def add_prefill(self, name: str, tokens_per_second: float = 1000.0) -> None:
        self.add(name, PREFILL, counters={"prompt_tokens_computed": 1e9 * tokens_per_second, "step_seconds": 1e9})

    def narrow(self, route: Route, *, may_offer: bool) -> Route | Lack:
        self.looks.append((route.prefill_id, route.decode_id, may_offer))
        if route.prefill_id in self.full:
            return Lack.PREFILL
        return Lack.DECODE if {worker.worker_id for worker in route.decodes} <= self.full else route

    def find(self, **fields: Any) -> tuple[str, str] | None:
        route = find_room(self.router, RoutingRequest("m", 100, 10, **fields), (), self.narrow)
        return None if route is None else (route.prefill_id, route.decode_id)


def test_another_prefill_worker_gets_what_the_soonest_has_no_room_for() -> None:
    fleet = Fleet()
    fleet.add("d")
    for name in ("pa", "pb", "pc"):
        fleet.add_prefill(name)
    assert fleet.find() == ("pa", "d")
    fleet.full |= {"pa", "pb"}
    assert fleet.find() == ("pc", "d")
    fleet.full.add("pc")
    assert fleet.find() is None


@pytest.mark.parametrize(("num_queued", "found"), [(0, None), (50, None), (60, ("slow", "d"))])
def test_a_slower_worker_is_not_worth_it_unless_the_wait_is_about_as_long(
    num_queued: int, found: tuple[str, str] | None
) -> None:
    """100 tokens take 208 ms at the slow one, hand-over included, and 108 ms, the queue and a quarter at the other."""
    fleet = Fleet()
    fleet.add("d")
    fleet.add_prefill("fast", 1000.0)
    fleet.add_prefill("slow", 500.0)
    fleet.full.add("fast")
    fleet.router.in_flight.prefill_tokens["fast-1"] = num_queued
    assert fleet.find() == found


def test_a_decode_worker_computes_the_prompt_only_where_it_may_and_where_that_is_about_as_soon() -> None:
    """An idle decode worker as fast as prefill takes 150 ms for the prompt: more than its 108 and a quarter."""
    for local_prefill, found in (("auto", ("", "d")), ("never", None)):
        fleet = Fleet(local_prefill)  # type: ignore[arg-type]
        fleet.add("d")
        fleet.add_prefill("p")
        fleet.full.add("p")
        assert fleet.find() is None, "to wait is sooner"
        fleet.router.in_flight.prefill_tokens["p-1"] = 30
        assert fleet.find() == found
        assert fleet.find(hand_over="always") is None


def test_a_worker_that_is_not_well_gets_nothing_because_another_is_full() -> None:
    fleet = Fleet()
    fleet.add("d")
    fleet.add_prefill("p")
    fleet.add_prefill("sick")
    fleet.full.add("p")
    assert fleet.find() == ("sick", "d")
    for worker in fleet.registry.workers(PREFILL):
        if worker.worker_id == "sick":
            for _ in range(3):
                fleet.router.health.watch(worker, None).failed("it answers nothing")
    assert set(fleet.router.health.out) == {"sick-1"}
    assert fleet.find() is None


def test_decode_workers_without_room_are_passed_by_and_only_the_first_are_offered_anything() -> None:
    fleet = Fleet()
    for name in "abcdef":
        fleet.add(f"d{name}")
    fleet.add_prefill("pa")
    fleet.add_prefill("pb")
    fleet.full |= {"pa", *(f"d{name}" for name in "abcdef")}
    assert fleet.find() is None
    assert fleet.looks[0] == ("pa", "da", True) and fleet.looks[1] == ("pb", "da", True)
    assert not any(may_offer for _, _, may_offer in fleet.looks[2:])


def test_what_was_refused_everywhere_is_said_at_the_first_look_only() -> None:
    fleet = Fleet()
    fleet.add("d")
    with pytest.raises(Overloaded):
        find_room(fleet.router, REQUEST, {"d-1"}, fleet.narrow)
    fleet.full.add("d")
    assert fleet.find() is None
