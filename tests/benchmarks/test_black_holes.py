"""Sick workers behind the real protocol cost no answer, get nothing more but trials, and are used again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.black_holes import __main__ as black_holes
from benchmarks.black_holes.__main__ import FULL, KINDS, NUM_FIRST, Reading, Seen, Size, enter
from benchmarks.black_holes.sick_workers import Sickness
from benchmarks.lib.command import Outcome

SHORT_FORM: tuple[Sickness, ...] = ("unreachable", "refuses_all", "never_answers")
"""The kinds of sick workers that a test has time for; `python -m benchmarks.black_holes` has all."""


def seen(longest: float, num_failed: int = 0) -> Seen:
    return Seen([0.02, longest], num_failed)


def test_each_target_is_met_or_missed_by_its_own_figure() -> None:
    outcome = Outcome()
    good = Reading(seen(0.03), seen(0.12), 0, 0, 3, 9.0, 0)
    bad = Reading(seen(0.03), seen(0.14, 1), 1, 2, 3, 10.5, 1)
    enter(outcome, FULL, {"refuses_all": good, "never_answers": bad})
    assert [target.is_met for target in outcome.targets] == [True, True, True, False, False, False]
    assert outcome.figures["never_answers.num_failed"] == 3
    assert outcome.figures["refuses_all.added_p99_ttft_ms"] == pytest.approx(90.0, abs=1.0)


def test_no_sick_worker_costs_an_answer_and_each_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_holes, "QUICK", Size(25, 50.0))
    monkeypatch.setattr(black_holes, "KINDS", {kind: KINDS[kind] for kind in SHORT_FORM})
    assert black_holes.main(["--quick", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    for kind in SHORT_FORM:
        assert figures[f"{kind}.num_failed"] == 0
        assert figures[f"{kind}.num_after_first"] <= NUM_FIRST  # the machine may be slow; most are 0
    assert figures["unreachable.num_after_first"] == 0
