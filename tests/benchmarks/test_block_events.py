"""The figures of block events follow from what the gateway read, and a short run completes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.block_events import __main__ as block_events
from benchmarks.block_events.__main__ import Reading, Size, enter
from benchmarks.lib.command import Outcome


def test_each_target_is_met_or_missed_by_its_own_figure() -> None:
    outcome = Outcome()
    enter(outcome, [], Reading(1_000_000, 88_000, 2.0, 0.01, 0.1, 500, 0.02, 35_000_000))
    enter(outcome, [], Reading(10_000_000, 880_000, 6.0, 0.06, 0.3, 1_600, 0.02, 60_000_000))
    assert [target.is_met for target in outcome.targets] == [True] * 5 + [False] * 5
    assert outcome.figures["10m_longest_lag_ms"] == pytest.approx(60.0)


def test_a_short_run_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_events, "QUICK", Size(4, 2, (2,), 1.0))
    assert block_events.main(["--quick", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert 0 < figures["0.002m_messages_per_second"] <= 4 * 4 + 4 * 2 + 8, "batches, and first heartbeats"
    assert figures["0.002m_points"] == pytest.approx(4 * 2 * 2 * 11, abs=4 * 11)
