"""Budgets: what they say, and what is predicted to keep them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.admission.budgets import DEFAULT_BUDGETS, NO_BUDGET, Budget, BudgetTable
from control_plane.admission.cached_shares import CachedShares
from control_plane.admission.prices import Prices
from control_plane.admission.token_times import TokenTimes
from control_plane.admission.worker_rooms import Report, WorkerRooms


def test_a_model_has_its_own_budget_or_that_of_all_others() -> None:
    table = BudgetTable.parse(("@cf/meta/llama=2.5/0.1", "*=0/0.5", "free=0/0"))
    assert table.of("@cf/meta/llama") == Budget(2.5, 0.1)
    assert table.of("another") == Budget(None, 0.5)
    assert table.of("free") == BudgetTable.parse(()).of("any") == NO_BUDGET
    assert BudgetTable.parse(DEFAULT_BUDGETS).of("any") == Budget(10.0, 0.25)


@pytest.mark.parametrize("entry", ["", "m", "m=", "m=1", "=1/1", "m=a/1", "m=1/-1", "m=1/inf", "m=1/nan", "m=1/2/3"])
def test_a_budget_that_is_none_is_refused_with_its_form(entry: str) -> None:
    with pytest.raises(ValueError, match="write MODEL=FIRST/NEXT"):
        BudgetTable.parse((entry,))
    with pytest.raises(ValueError, match="twice"):
        BudgetTable.parse(("m=1/1", "m=2/2"))


def times_of(*samples: tuple[int, float]) -> TokenTimes:
    """Return the times after reports of so many running answers and milliseconds per token."""
    times = TokenTimes()
    for num_running, token_ms in samples:
        times.add(num_running, num_steps=100, step_seconds=100 * token_ms / 1000, num_tokens=100 * num_running)
    return times


def test_one_more_answer_is_predicted_by_the_line_through_the_reports() -> None:
    times = times_of((4, 14.0), (8, 18.0), (12, 22.0), (10, 20.0))
    assert times.predicted_ms(16) == pytest.approx(26.0)
    assert times.keeps(26.5, 16) and not times_of((4, 14.0), (8, 18.0), (40, 50.0)).keeps(45.0, 60)


def test_without_different_numbers_of_answers_the_mean_is_predicted() -> None:
    assert times_of((8, 20.0), (8, 30.0)).predicted_ms(64) == pytest.approx(20.0 * 0.8 / 1.8 + 30.0 / 1.8)
    assert TokenTimes().predicted_ms(5) is None and TokenTimes().keeps(1.0, 100)


def test_several_tokens_of_a_step_are_so_much_faster() -> None:
    times = TokenTimes()
    times.add(num_running=2, num_steps=10, step_seconds=1.0, num_tokens=60)
    assert times.predicted_ms(2) == pytest.approx(1000 * 1.0 * 2 / 60)


def test_a_budget_that_few_answers_cannot_keep_is_twice_their_time() -> None:
    slow = times_of((1, 300.0), (1, 320.0))
    assert slow.keeps(250.0, 2)
    crowded = times_of((1, 300.0), (4, 900.0), (4, 900.0))
    assert not crowded.keeps(250.0, 5)


def test_reports_without_steps_or_tokens_tell_nothing() -> None:
    times = TokenTimes()
    times.add(4, num_steps=1, step_seconds=9.0, num_tokens=4)
    times.add(4, num_steps=100, step_seconds=9.0, num_tokens=0)
    times.add(0, num_steps=100, step_seconds=9.0, num_tokens=7)
    times.add(4, num_steps=-100, step_seconds=-9.0, num_tokens=-7)  # its engine is a new one
    assert times.predicted_ms(5) is None


def test_a_worker_whose_answers_would_be_too_slow_gets_no_more_until_they_are_few() -> None:
    rooms = WorkerRooms()
    report = Report(10_000, 20_000, 10, num_live=0)
    for number, (num_running, token_ms) in enumerate([(1, 20.0), (10, 110.0), (20, 210.0), (20, 210.0)], start=1):
        steps = 100.0 * number
        report = replace(
            report,
            num_live=num_running,
            num_running=num_running,
            num_steps=steps,
            step_seconds=report.step_seconds + 100 * token_ms / 1000,
            num_tokens_generated=report.num_tokens_generated + 100 * num_running,
        )
        rooms.reported("w", report)
    assert rooms.has_room("w", 10) and rooms.has_room("w", 10, token_seconds=0.5)
    assert not rooms.has_room("w", 10, token_seconds=0.15, may_offer=True)
    rooms.reported("w", replace(report, num_live=5, num_running=5))
    assert rooms.has_room("w", 10, token_seconds=0.15)
    rooms.reported("w", replace(report, num_live=0, num_running=0))
    assert rooms.has_room("w", 10, token_seconds=0.001), "an idle worker takes one in any case"


def test_the_usual_cached_share_is_the_sessions_else_the_accounts() -> None:
    shares = CachedShares(max_kept=3)
    assert shares.of("a", "s") == 0
    shares.finished("a", "", 0, 100)
    shares.finished("a", "s", 90, 100)
    assert shares.of("a", "s") == 0.9
    assert shares.of("a", "other") == shares.of("a", "") == pytest.approx(0.18)
    shares.finished("a", "s", 0, 0)
    assert shares.of("a", "s") == 0.9
    for number in range(10):
        shares.finished(f"account-{number}", f"s-{number}", 1, 2)
    assert len(shares) == 3 and shares.of("a", "s") == 0


def test_prices_follow_what_requests_take() -> None:
    prices = Prices()
    for _ in range(200):
        prices.routed(100, 50.0)
        prices.stepped(0.4, 100)
        prices.answered(10)
        prices.prepared(600, 100)
    assert prices.request_ms(1000, 500) == pytest.approx(1000 * 0.5 + 10 * 4, rel=0.01)
    assert prices.request_ms(0, 5, num_choices=3) == pytest.approx(60, rel=0.01)
    assert prices.bytes_per_token == pytest.approx(6, rel=0.01)
    prices.routed(0, 0.0)
    prices.stepped(0.0, 0)
    prices.stepped(-3.0, -7)  # its engine is a new one
    prices.prepared(5, 0)
    assert prices.ms_per_prompt_token == pytest.approx(0.5, rel=0.01)
    assert prices.ms_per_answer_token == pytest.approx(4.0)


def test_prompts_of_which_caches_have_all_but_a_token_do_not_make_long_ones_dear() -> None:
    prices = Prices()
    for _ in range(50):
        prices.routed(1, 5.0)
        prices.routed(1000, 500.0)
    assert prices.ms_per_prompt_token == pytest.approx(505 / 1001, rel=0.06)  # the older half weighs a little less


def test_the_first_measurements_replace_what_was_assumed() -> None:
    prices = Prices()
    assert not prices.is_measured
    prices.answered(30)
    prices.answered(50)
    prices.stepped(1.0, 100)
    assert prices.is_measured
    assert (prices.answer_tokens, prices.ms_per_answer_token) == (40, 10)
