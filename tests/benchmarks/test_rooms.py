"""The figures of a full model beside an idle one follow from the readings, and a short run completes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib.command import Outcome
from benchmarks.rooms.__main__ import Readings, Size, enter, measure_turns

_WELL = (True, "full", "proven")


def test_each_gateway_is_judged_by_its_ratio_and_by_the_states_of_all_turns() -> None:
    outcome = Outcome()
    enter(
        outcome,
        [
            Readings([0.010, 0.011, 0.010], [0.010, 0.011, 0.011], [_WELL, _WELL]),
            Readings([0.010, 0.011, 0.010], [0.012, 0.013, 0.012], [_WELL, (False, "full", "proven")]),
        ],
    )
    assert [target.is_met for target in outcome.targets] == [True, True, False, False]
    assert outcome.figures["gateway_0_ratio"] == pytest.approx(1.1)
    assert outcome.figures["gateway_1_ratio"] == pytest.approx(1.2)
    assert outcome.figures["gateway_1_turns_ready"] == 1


@pytest.mark.timeout(120)
def test_a_short_run_shows_both_gateways_ready_beside_a_full_model(tmp_path: Path) -> None:
    readings = measure_turns(Size(num_turns=1, num_requests=2, num_waiting=5), tmp_path / "rooms", lambda line: None)
    assert [each.states for each in readings] == [[_WELL], [_WELL]]
    assert all(len(each.alone) == len(each.beside) == 2 for each in readings)
