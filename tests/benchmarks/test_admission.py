"""The cost of a refusal follows from the readings, and a short run is refused by a full model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.admission.__main__ import Reading, Size, enter, measure_kinds
from benchmarks.lib.command import Outcome


def test_a_refusal_is_judged_by_its_time_and_by_what_it_costs_above_a_health_check() -> None:
    outcome = Outcome()
    cheap, dear = Reading([0.002, 0.003], 0.002, [1, 4]), Reading([0.01, 0.08], 0.006, [2])
    enter(outcome, {"GET /healthz": Reading([0.001, 0.001], 0.001), "200 characters": cheap, "8 kB": dear})
    assert [target.is_met for target in outcome.targets] == [True, True, False, False]
    assert outcome.figures["refusal_200_cpu_above_health_ms"] == pytest.approx(0.5)
    assert outcome.figures["refusal_8000_cpu_above_health_ms"] == pytest.approx(2.5)


@pytest.mark.timeout(120)
def test_a_short_run_is_refused_with_a_time_to_come_again(tmp_path: Path) -> None:
    readings = measure_kinds(Size(num_turns=1, num_requests=2), tmp_path / "admission", lambda line: None)
    assert {name: len(each.seconds) for name, each in readings.items()} == dict.fromkeys(readings, 2)
    assert all(len(each.retry_after) == 2 and min(each.retry_after) >= 1 for each in list(readings.values())[1:])
