"""Short runs of the simulation of KV handles under faults; `make simulate` runs longer."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.kv_transfer_svc.simulation.harness import ACTIONS, Harness, new_harness
from tests.kv_transfer_svc.simulation.runner import Totals, run_seed

_SECONDS = st.sampled_from([0.0, 0.002, 0.02, 0.1, 1.0])


class AnyOrder(RuleBasedStateMachine):
    """Hypothesis chooses the actions and times; every step checks the invariants, and the run ends at rest."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._harness: Harness | None = None

    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed: int) -> None:
        self._harness = self._stack.enter_context(new_harness(seed))

    @rule(action=st.sampled_from(["submit", *ACTIONS]), seconds=_SECONDS)
    def happen(self, action: str, seconds: float) -> None:
        assert self._harness is not None, "created before the first rule"
        getattr(self._harness, action)()
        self._harness.run(seconds)

    def teardown(self) -> None:
        with self._stack:
            if self._harness is not None:
                self._harness.come_to_rest()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=5,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("seed", [11])
def test_nothing_leaks_and_no_wrong_token_comes_under_any_fault(seed: int) -> None:
    totals = Totals()
    run_seed(seed, 200, totals)
    assert totals.counts["requests completed"] > 10
    assert totals.counts["blocks accepted by readers"] > 20
    assert totals.counts["windows freed before the end of their pull"] > 5


def test_a_seed_repeats_the_same_run() -> None:
    first, second = Totals(), Totals()
    for totals in (first, second):
        run_seed(5, 40, totals)
    assert first.num_events == second.num_events
    assert (first.edges, first.counts) == (second.edges, second.counts)
