"""The comparison of two checkouts: ratios point the right way, and a wide interval is no result."""

from __future__ import annotations

import pytest

from benchmarks.ab.__main__ import enter, values_of
from benchmarks.ab.ratios import Ratio, median_of_ratios, ratio_of_medians, ratio_of_sums
from benchmarks.ab.sides import PARTS, Part
from benchmarks.ab.turns import Turns
from benchmarks.isolation_itl import stats as isolation
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


def test_a_value_that_nothing_measured_is_not_compared() -> None:
    with pytest.raises(ValueError, match="0 or less"):
        ratio_of_medians([0.0, 0.0], [1.0, 1.0], is_time=False)


def test_only_figures_that_the_part_names_and_all_runs_have_are_compared() -> None:
    outcome = Outcome()
    old = [{"a_per_second": 100.0, "b_ms": 5.0, "other": 1.0, "gone_ms": 1.0}] * 3
    new = [{"a_per_second": 80.0, "b_ms": 5.0, "other": 9.0, "added_ms": 1.0}] * 3
    enter(outcome, _PART, {"old": old, "new": new})
    assert [(row[0], row[-1]) for row in outcome.sheets[0].rows] == [("a_per_second", "worse"), ("b_ms", "not worse")]
    assert [target.is_met for target in outcome.targets] == [False, True]
    assert outcome.figures["a_per_second.old.3"] == 100.0 and outcome.figures["a_per_second.new.1"] == 80.0


def test_the_gaps_first_tokens_and_rates_beside_long_prompts_are_compared() -> None:
    run = isolation.Observed(
        [[1.0, 1.5, 10.5, 10.6]], [isolation.Prompt(10.0, 2048, (11.0, 11.1))], (0.0, 10.0), (10.0, 20.0), 0.0
    )
    found = isolation.figures([run], isolation.InTime(6.0, 0.1))
    part = PARTS["isolation_itl"]
    sides = {name: part.is_time(name) for name in isolation.all_figures({"disaggregated": found, "aggregated": found})}
    compared = {"itl_ms.p50": True, "itl_ms.p99": True, "ttft_s.p50": True}
    compared |= {"stream_tokens_per_second": False, "prompt_tokens_per_second": False}
    assert {name: is_time for name, is_time in sides.items() if is_time is not None} == {
        f"{system}.{name}": is_time for system in ("disaggregated", "aggregated") for name, is_time in compared.items()
    }


def test_an_interrupted_comparison_without_two_runs_of_each_judges_nothing() -> None:
    outcome = Outcome()
    enter(outcome, _PART, {"old": [{"b_ms": 5.0}] * 2, "new": [{"b_ms": 5.0}]})
    assert not outcome.sheets and not outcome.targets


def test_a_machine_that_changes_its_speed_cancels_turn_by_turn() -> None:
    speeds = [0.4, 0.5, 1.0, 0.9, 0.6, 1.1, 0.7, 0.8]
    old, new = [100 * speed for speed in speeds], [98 * speed for speed in speeds]
    ratio = median_of_ratios(old, new, is_time=False)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((0.98, 0.98, 0.98))
    assert median_of_ratios(new, old, is_time=True).value == pytest.approx(0.98)
    assert ratio_of_medians(old, new, is_time=False).verdict == "no result"
    with pytest.raises(ValueError, match="2 old and 3 new"):
        median_of_ratios([1.0] * 2, [1.0] * 3, is_time=False)


def test_an_interval_of_turns_does_not_grow_by_what_both_sides_share() -> None:
    speeds = [0.4, 0.5, 1.0, 0.9, 0.6, 1.1, 0.7, 0.8]
    old, new = [100 * speed for speed in speeds], [96 * speed for speed in speeds]
    ratio = ratio_of_medians(old, new, is_time=False, are_turns=True)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((0.96, 0.96, 0.96))
    assert ratio.verdict == "worse" and ratio_of_medians(old, new, is_time=False).verdict == "no result"
    with pytest.raises(ValueError, match="2 old and 3 new"):
        ratio_of_medians([1.0] * 2, [1.0] * 3, is_time=False, are_turns=True)


def test_an_earlier_run_gives_its_turns_in_their_order() -> None:
    outcome = Outcome()
    old, new = [{"b_ms": float(n)} for n in range(1, 13)], [{"b_ms": 2.0 * n} for n in range(1, 13)]
    enter(outcome, _PART, {"old": old, "new": new})
    assert values_of(outcome.figures, "b_ms", "old") == [each["b_ms"] for each in old]
    assert values_of(outcome.figures, "b_ms", "new") == [each["b_ms"] for each in new]
    assert values_of(outcome.figures, "a_ms", "new") == []


def test_figures_without_a_result_are_measured_alone() -> None:
    assert Turns().wants("M.x.decode_b1") and Turns(only="decode_b[18]$").wants("M.x.decode_b8")
    assert not Turns(only="decode_b[18]$").wants("M.x.prefill")


def test_pieces_of_work_are_compared_by_the_time_that_all_of_them_took() -> None:
    ratio = ratio_of_sums([1.0, 2.0, 3.0], [0.5, 1.0, 1.5])
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    ratio = ratio_of_sums([1.0, 9.0], [1.0, 3.0])
    assert ratio.value == pytest.approx(2.5) and (ratio.low, ratio.high) == pytest.approx((1.0, 3.0))
