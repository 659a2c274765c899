"""A kind of request holds a gateway up if a turn of the loop computed for long, and a short run completes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib.command import Outcome
from benchmarks.stalls import __main__ as stalls
from benchmarks.stalls.__main__ import Size, kinds, measure


@pytest.mark.parametrize(("seconds", "is_met"), [((), True), ((0.01, 0.05), True), ((0.01, 0.051, 0.02), False)])
def test_what_computed_for_long_counts_and_what_waited_for_the_processor_does_not(
    seconds: tuple[float, ...], is_met: bool
) -> None:
    outcome = Outcome()
    lines = [{"cpu_seconds": each, "frames": ["a", "b", "c"]} for each in seconds]
    row = stalls._entered(outcome, "GET /v1/x", 0.5, 0.1, lines)
    assert [target.is_met for target in outcome.targets] == [is_met]
    assert row[3] == str(len(seconds)) and outcome.figures["get_v1_x.longest_turn_ms"] == 1000 * max(
        seconds, default=0.0
    )


async def test_a_short_run_sends_every_kind(tmp_path: Path) -> None:
    outcome, size = Outcome(), Size(4, 1, 10)
    await measure(size, outcome, tmp_path, lambda line: None)
    (sheet,) = outcome.sheets
    assert [row[0] for row in sheet.rows] == ["nothing", *(kind.name for kind in kinds(size))]
    assert all(value >= 0 for value in outcome.figures.values())
