"""The comparison of two checkouts: ratios point the right way, and a wide interval is no result."""

from __future__ import annotations

import pytest

from benchmarks.ab.__main__ import enter
from benchmarks.ab.ratios import Ratio, ratio_of_medians
from benchmarks.ab.sides import Part
from benchmarks.lib.command import Outcome

_PART = Part((), rates=r".*per_second", times=r".*_ms")


def test_below_one_is_worse_for_rates_and_for_times() -> None:
    assert ratio_of_medians([100.0] * 5, [90.0] * 5, is_time=False).value == pytest.approx(0.9)
    assert ratio_of_medians([90.0] * 5, [100.0] * 5, is_time=True).value == pytest.approx(0.9)


def test_equal_samples_have_a_ratio_of_one_within_the_interval() -> None:
    ratio = ratio_of_medians([99.0, 100.0, 101.0], [99.0, 100.0, 101.0], is_time=False)
    assert ratio.value == 1.0 and ratio.low <= 1.0 <= ratio.high


def test_a_verdict_needs_a_narrow_interval() -> None:
    assert Ratio(0.90, 0.84, 0.95).verdict == "no result"
    assert Ratio(0.94, 0.92, 0.96).verdict == "worse"
    assert Ratio(0.96, 0.93, 0.98).verdict == "not worse"


def test_two_values_at_least_are_wanted() -> None:
    with pytest.raises(ValueError, match="1 old and 5 new"):
        ratio_of_medians([1.0], [1.0] * 5, is_time=False)


def test_only_figures_that_the_part_names_and_all_runs_have_are_compared() -> None:
    outcome = Outcome()
    old = [{"a_per_second": 100.0, "b_ms": 5.0, "other": 1.0, "gone_ms": 1.0}] * 3
    new = [{"a_per_second": 80.0, "b_ms": 5.0, "other": 9.0, "added_ms": 1.0}] * 3
    enter(outcome, _PART, {"old": old, "new": new})
    assert [(row[0], row[-1]) for row in outcome.sheets[0].rows] == [("a_per_second", "worse"), ("b_ms", "not worse")]
    assert [target.is_met for target in outcome.targets] == [False, True]
    assert outcome.figures["a_per_second.old.3"] == 100.0 and outcome.figures["a_per_second.new.1"] == 80.0


def test_an_interrupted_comparison_without_two_runs_of_each_judges_nothing() -> None:
    outcome = Outcome()
    enter(outcome, _PART, {"old": [{"b_ms": 5.0}] * 2, "new": [{"b_ms": 5.0}]})
    assert not outcome.sheets and not outcome.targets
