"""Does the life of a KV handle hold, whatever the network and its processes do? `make simulate` asks for longer."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.kv_transfer_svc.simulation.harness import ACTIONS, World, new_world
from tests.kv_transfer_svc.simulation.runner import Totals, play

_SECONDS = st.sampled_from([0.0, 0.002, 0.02, 0.1, 1.0])


class AnyOrder(RuleBasedStateMachine):
    """Hypothesis chooses what happens and when; each step is followed by every invariant, the end by rest."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._world: World | None = None

    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed: int) -> None:
        self._world = self._stack.enter_context(new_world(seed))

    @rule(action=st.sampled_from(["submit", *ACTIONS]), seconds=_SECONDS)
    def happen(self, action: str, seconds: float) -> None:
        assert self._world is not None, "begun before the first rule"
        getattr(self._world, action)()
        self._world.run(seconds)

    def teardown(self) -> None:
        with self._stack:
            if self._world is not None:
                self._world.come_to_rest()


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
    play(seed, 200, totals)
    assert totals.counts["requests completed"] > 10
    assert totals.counts["blocks accepted by readers"] > 20


def test_a_seed_plays_the_same_world_again() -> None:
    first, second = Totals(), Totals()
    for totals in (first, second):
        play(5, 40, totals)
    assert first.num_events == second.num_events
    assert (first.edges, first.counts) == (second.edges, second.counts)
