"""The statistics find a difference, and find none where there is none."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.isolation.__main__ import Kind, Samples, add, in_random_order, num_hits_across
from benchmarks.isolation.significance import compare
from benchmarks.lib.command import Outcome
from benchmarks.lib.stats import Answer

_TIMES = st.lists(st.integers(1, 6).map(float), min_size=2, max_size=8)


def _normal(count: int, mean: float, seed: int) -> list[float]:
    return [float(value) for value in np.random.default_rng(seed).normal(mean, 1.0, count)]


@settings(deadline=None)
@given(_TIMES, _TIMES)
def test_the_auc_is_the_share_of_pairs_by_brute_force(first: list[float], second: list[float]) -> None:
    assert compare(first, second, num_shuffles=10).auc == pytest.approx(_auc(first, second))


@settings(deadline=None)
@given(_TIMES, _TIMES)
def test_which_sample_is_named_first_changes_only_the_side(first: list[float], second: list[float]) -> None:
    one, other = compare(first, second, num_shuffles=2000), compare(second, first, num_shuffles=2000)
    assert other.auc == pytest.approx(1 - one.auc)
    assert (other.auc_low, other.auc_high) == pytest.approx((1 - one.auc_high, 1 - one.auc_low))
    assert other.p_value == pytest.approx(one.p_value, abs=0.06)


def test_every_labelling_of_a_small_sample_is_as_likely() -> None:
    """Of the 20 ways to take 3 of 6, two are as far out as 1, 2, 3 against 4, 5, 6."""
    assert compare([1, 2, 3], [4, 5, 6]).p_value == pytest.approx(2 / 20, abs=0.01)


@settings(deadline=None)
@given(_TIMES.filter(lambda times: len(times) < 5), _TIMES.filter(lambda times: len(times) < 5))
def test_p_is_the_share_of_labellings_as_far_from_even_by_brute_force(first: list[float], second: list[float]) -> None:
    values = [*first, *second]
    labellings = list(itertools.combinations(range(len(values)), len(first)))
    distances = [abs(_auc([values[i] for i in mine], _others(values, mine)) - 0.5) for mine in labellings]
    share = sum(distance >= distances[0] - 1e-9 for distance in distances) / len(labellings)
    assert compare(first, second, num_shuffles=2000).p_value == pytest.approx(share, abs=0.06)


def _others(values: list[float], mine: tuple[int, ...]) -> list[float]:
    return [value for index, value in enumerate(values) if index not in mine]


def _auc(first: list[float], second: list[float]) -> float:
    pairs = [1.0 if a < b else 0.5 if a == b else 0.0 for a in first for b in second]
    return sum(pairs) / len(pairs)


def test_samples_of_one_distribution_rarely_differ() -> None:
    """p is uniform there: a few of 100 below 0.05, and the interval misses 0.5 as often."""
    compared = [compare(_normal(30, 0.0, 2 * seed), _normal(30, 0.0, 2 * seed + 1), 1000) for seed in range(100)]
    assert sum(each.p_value < 0.05 for each in compared) in range(1, 12)
    assert sum(not each.auc_low <= 0.5 <= each.auc_high for each in compared) in range(1, 12)


def test_samples_that_are_shifted_differ() -> None:
    """Half a standard deviation is an AUC of 0.638."""
    comparison = compare(_normal(400, 0.0, 1), _normal(400, 0.5, 2))
    assert comparison.p_value < 0.001
    assert comparison.auc_low < 0.638 < comparison.auc_high
    assert comparison.auc_low > 0.5


def test_equal_values_are_half_of_each() -> None:
    comparison = compare([1.0] * 10, [1.0] * 10)
    assert (comparison.auc, comparison.p_value) == (0.5, 1.0)


def test_one_value_says_nothing_of_how_much_values_vary() -> None:
    with pytest.raises(ValueError, match="two of each at least"):
        compare([1.0], [2.0, 3.0])


def test_everybody_asks_each_prompt_once_in_no_order() -> None:
    shared, fresh = [f"s{n}" for n in range(50)], [f"f{n}" for n in range(50)]
    asked = in_random_order(shared, fresh)
    kinds: dict[Kind, list[str]] = {"asked_by_a": shared, "asked_by_nobody": fresh, "a_again": shared}
    assert {kind: sorted(prompt for each, prompt in asked if each == kind) for kind in kinds} == {
        kind: sorted(prompts) for kind, prompts in kinds.items()
    }
    assert {kind for kind, _ in asked[:50]} == set(kinds)


def test_a_cache_that_tells_is_found_out() -> None:
    outcome = _found(_samples(shared_ms=40.0, fresh_ms=50.0))
    assert outcome.figures["isolation_p_value"] < 0.01
    assert outcome.figures["isolation_auc"] > 0.9
    assert [target.is_met for target in outcome.targets] == [True, False, True]


def test_a_test_without_power_says_so() -> None:
    outcome = _found(_samples(shared_ms=50.0, fresh_ms=50.0, again_ms=50.0))
    assert [target.is_met for target in outcome.targets] == [True, True, False]


def test_one_cached_token_of_another_account_is_a_hit() -> None:
    samples = _samples(shared_ms=50.0, fresh_ms=50.0, num_shared_cached=1)
    assert num_hits_across(samples) == 100
    outcome = _found(samples)
    assert outcome.figures["hits_across_accounts"] == 100
    assert [target.is_met for target in outcome.targets] == [False, True, True]


def _found(samples: Samples) -> Outcome:
    outcome = Outcome()
    add(outcome, samples)
    return outcome


def _samples(*, shared_ms: float, fresh_ms: float, again_ms: float = 10.0, num_shared_cached: int = 0) -> Samples:
    chance = random.Random(4)

    def answers(mean_ms: float, num_cached_tokens: int) -> list[Answer]:
        ttfts = [chance.gauss(mean_ms, 3.0) / 1000 for _ in range(100)]
        return [Answer("t", 0.0, (ttft,), ttft, 256, num_cached_tokens, 1) for ttft in ttfts]

    return {
        "asked_by_a": answers(shared_ms, num_shared_cached),
        "asked_by_nobody": answers(fresh_ms, 0),
        "a_again": answers(again_ms, 240),
    }
