"""Prefill workers of one kind count as equally fast until each has computed much by itself."""

from __future__ import annotations

import pytest

from control_plane.fleet.registry import WorkerRegistry
from control_plane.routing.prefill_rates import PrefillRates
from control_plane.routing.router import Router
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb

MUCH = 1e9


class _Fleet:
    def __init__(self) -> None:
        self.now = 0.0
        self.registry = WorkerRegistry(1e9, 2e9, lambda: self.now)
        self.rates = PrefillRates(self.registry)

    def report(self, name: str, num_tokens: float, seconds: float, numerics_class: str = "x") -> None:
        counters = {"prompt_tokens_computed": num_tokens, "step_seconds": seconds}
        load = pb.LoadReport(state=pb.WORKER_STATE_READY, counters=counters)
        if self.registry.get(name) is not None:
            assert self.registry.heartbeat(cp.HeartbeatRequest(worker_id=name, incarnation=name, load=load))
            return
        info = pb.WorkerInfo(worker_id=name, incarnation=name, role=pb.WORKER_ROLE_PREFILL)
        info.card.model_id, info.card.fingerprint.numerics_class = "m", numerics_class
        self.registry.register(info, load)


def test_equal_workers_with_few_prompts_look_equal_whatever_prompts_these_were() -> None:
    fleet = _Fleet()
    for name, seconds in (("a", 0.5), ("b", 1.0)):  # b had short prompts, which take more for each token
        fleet.report(name, 0.0, 0.0)
        assert fleet.rates.of(name) is None
        fleet.report(name, 10_000.0, seconds)
    fleet.report("a", 10_000.0, 0.5)
    mean = 20_000 / 1.5
    assert fleet.rates.of("a") == pytest.approx(mean, rel=0.1)
    assert fleet.rates.of("b") == pytest.approx(mean, rel=0.1)


def test_a_worker_that_has_computed_much_is_as_fast_as_it_says() -> None:
    fleet = _Fleet()
    fleet.report("slow", 1_000.0 * MUCH, MUCH)
    fleet.report("fast", 9_000.0 * MUCH, MUCH)
    fleet.report("slow", 1_000.0 * MUCH, MUCH)
    assert fleet.rates.of("slow") == pytest.approx(1_000.0, rel=0.001)
    assert fleet.rates.of("fast") == pytest.approx(9_000.0, rel=0.001)


def test_workers_of_another_class_and_those_that_have_gone_are_no_peers() -> None:
    fleet = _Fleet()
    fleet.report("other", 9_000.0 * MUCH, MUCH, numerics_class="y")
    fleet.report("gone", 9_000.0 * MUCH, MUCH)
    fleet.registry.deregister("gone", "gone")
    fleet.report("a", 100.0, 1.0)
    assert fleet.rates.of("a") == pytest.approx(100.0)
    assert fleet.rates.of("gone") is None
    fleet.registry.deregister("a", "a")
    fleet.report("a", 300.0, 1.0)
    assert fleet.rates.of("a") == pytest.approx(300.0)


def test_workers_without_a_report_count_as_fast_as_the_first_one_that_has_reported_at_once() -> None:
    fleet = _Fleet()
    costs = Router(fleet.registry, clock=lambda: fleet.now).costs
    for name in "ab":
        fleet.report(name, 0.0, 0.0)
    unknown = fleet.registry.get("b")
    assert unknown is not None
    assumed = costs.tokens_per_second(unknown)
    fleet.report("a", 50_000.0, 1.0)
    assert costs.tokens_per_second(unknown) == pytest.approx(50_000.0) != assumed


def test_what_a_worker_claims_is_gone_with_the_worker_however_much_it_was() -> None:
    """Sums of fractions lost what the others had computed, and the next report of these raised."""
    fleet = _Fleet()
    for name in "ab":
        fleet.report(name, 1_000.0, 0.5)
    fleet.report("liar", 1e24, 1e24)
    fleet.registry.deregister("liar", "liar")
    for name in "ab":
        fleet.report(name, 1_000.0, 0.5)
    assert fleet.rates.of("a") == pytest.approx(2_000.0)
    for name in "ab":
        fleet.registry.deregister(name, name)
