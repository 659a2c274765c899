"""The cost of a step is judged turn by turn, and a short run of one checkout beside itself completes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib.command import Outcome
from benchmarks.step_batch.__main__ import enter, seconds_per_token

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("more", "is_met"), [(1.04, True), (1.06, False)])
def test_a_machine_that_becomes_slower_does_so_for_both(more: float, is_met: bool) -> None:
    outcome, old = Outcome(), [1e-6, 2e-6, 3e-6]
    enter(outcome, old, [more * each for each in old])
    assert [target.is_met for target in outcome.targets] == [is_met]
    assert outcome.figures["new_over_old"] == pytest.approx(more)
    assert outcome.figures["old.us_per_token"] == pytest.approx(2.0)


@pytest.mark.timeout(120)
def test_steps_run_by_their_path_in_a_checkout(tmp_path: Path) -> None:
    assert 0 < seconds_per_token(ROOT, 5) < 0.01
    with pytest.raises(RuntimeError, match="No module named"):
        seconds_per_token(tmp_path, 5)
