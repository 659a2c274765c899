"""How long a request would wait is predicted from what was let in, what waits and what accounts ask for."""

from __future__ import annotations

import pytest

from control_plane.admission.budgets import Budget
from control_plane.admission.elsewhere import AccountTurn, LetIn
from control_plane.admission.model_admission import Bounds, ModelAdmission, Waiter
from control_plane.admission.service_classes import ServiceClass

BOUNDS = Bounds(1000, 1000)


def test_the_wait_is_predicted_from_what_was_let_in_and_from_the_accounts_part() -> None:
    admission = ModelAdmission(BOUNDS)
    for _ in range(18):
        admission.enter(Waiter("m", "greedy", cost_ms=100.0), 0.0)
    for index in range(10):
        waiter = admission.first()
        assert waiter is not None
        now = 0.2 * (index + 1)
        admission.leave(waiter, now)
        admission.let_in(waiter, 100.0, now)

    def wait_of(account: str, service_class: int) -> float | None:
        return admission.predicted_wait_seconds(Waiter("m", account, service_class, cost_ms=100.0), 2.0)

    # about 500 ms a second: 8 wait, and on average half a request goes before the next chance
    assert wait_of("greedy", 0) == pytest.approx(850 / 500, rel=0.1)
    assert wait_of("small", 0) == pytest.approx((100 + 50) / 500, rel=0.1), "two accounts take turns"
    assert wait_of("small", 1) == pytest.approx(50 / 500, rel=0.1), "none of its class waits"


def test_before_any_was_let_in_a_device_is_taken_to_do_a_seconds_work_in_a_second() -> None:
    admission = ModelAdmission(BOUNDS)
    for _ in range(5):
        admission.enter(Waiter("m", "a", cost_ms=600.0), 0.0)
    newcomer = Waiter("m", "a", cost_ms=600.0)
    assert admission.predicted_wait_seconds(newcomer, 0.0) is None
    admission.stepped("w1", 0.0, 0.0, 0.0)
    assert admission.predicted_wait_seconds(newcomer, 0.0) == pytest.approx(3.0)
    admission.stepped("w2", 0.0, 0.0, 0.0)
    assert admission.predicted_wait_seconds(newcomer, 0.0) == pytest.approx(1.5)
    admission.worker_gone("w1", 0.0)
    assert admission.predicted_wait_seconds(newcomer, 0.0) == pytest.approx(3.0)


def test_an_account_in_debt_waits_for_those_that_have_had_less() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.stepped("w", 0.0, 0.0, 0.0)
    for account in ("a", "b"):
        for _ in range(5):
            admission.enter(Waiter("m", account, cost_ms=100.0), 0.0)
    admission.counters[0].charge("a", 400.0)

    def wait_of(account: str) -> float | None:
        return admission.predicted_wait_seconds(Waiter("m", account, cost_ms=100.0), 1000.0)

    assert wait_of("a") == pytest.approx(1.0, rel=0.05), "all five of the other account, and its own"
    assert wait_of("b") == pytest.approx(0.5 + 0.2, rel=0.05), "its own, one at 400 and the next one at 500"


def test_what_waits_at_other_gateways_is_waited_for_as_what_waits_here() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.stepped("w", 0.0, 0.0, 0.0)
    for account in ("a", "b"):
        for _ in range(10):
            admission.enter(Waiter("m", account, cost_ms=100.0), 0.0)

    def wait_of(account: str, *turns: AccountTurn) -> float | None:
        admission.granted("w", turns, LetIn(), 1000.0)
        return admission.predicted_wait_seconds(Waiter("m", account, cost_ms=100.0), 1000.0)

    own, other = AccountTurn("a", 0, 0.0, 10, 100.0, 0.0), AccountTurn("b", 0, 0.0, 0, 0.0, 0.0)
    assert wait_of("a", own, other) == pytest.approx(2.0 + 1.0), "its own at both, and all ten of the other account"
    assert wait_of("b", own, other) == pytest.approx(1.0 + 1.1), "its own, and as many of the one at both"
    third = AccountTurn("c", 0, 0.0, 5, 50.0, 0.0)
    assert wait_of("b", own, other, third) == pytest.approx(1.0 + 1.1 + 0.5), "nor is the third account here"
    first = AccountTurn("d", 1, 900.0, 3, 30.0, 0.0)
    assert wait_of("b", own, other, first) == pytest.approx(1.0 + 1.1 + 0.3), "a higher class goes before it"
    in_debt = AccountTurn("c", 0, 300.0, 5, 50.0, 0.0)
    assert wait_of("b", own, other, in_debt) == pytest.approx(1.0 + 1.1), "three seconds ahead"
    asks = AccountTurn("c", 0, 0.0, 0, 0.0, 20.0)
    assert wait_of("b", own, other, asks) == pytest.approx((1.0 + 1.1) / 0.8, rel=0.01), "a fifth of the worker"
    assert wait_of("b") == pytest.approx(1.0 + 1.0), "they wait no more"


def test_what_other_gateways_let_in_counts_to_the_rate() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.granted("w", (), LetIn(5000.0, 500), 0.0)
    admission.enter(Waiter("m", "a", cost_ms=100.0), 0.0)
    urgent = Waiter("m", "b", ServiceClass.PRIORITY, cost_ms=100.0)
    for second in range(1, 60):
        admission.granted("w", (), LetIn(5000.0 + 20.0 * second, 500 + 2 * second), float(second))
    # 200 ms a second, and on average half a request of 100 goes before the next chance
    assert admission.predicted_wait_seconds(urgent, 59.0) == pytest.approx(0.25, rel=0.05)
    admission.granted("w", (), LetIn(0.0, 0), 59.0)  # a new stream begins at zero
    assert admission.predicted_wait_seconds(urgent, 59.0) == pytest.approx(0.25, rel=0.05)


def test_a_gateway_where_nothing_waits_knows_for_some_seconds_what_waits_at_others() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.stepped("w", 0.0, 0.0, 0.0)
    admission.granted("w", [AccountTurn("a", 0, 0.0, 10, 100.0, 0.0)], LetIn(), 0.0)
    assert admission.predicted_wait_seconds(Waiter("m", "a"), 1.0) == pytest.approx(1.0), "else it would be let wait"
    assert admission.predicted_wait_seconds(Waiter("m", "a"), 9.0) == 0.0, "the worker has told nothing since"


def test_what_accounts_send_to_several_workers_adds_up_and_what_waits_does_not() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.enter(Waiter("m", "a", cost_ms=1000.0), 0.0)
    for worker in ("w1", "w2"):
        admission.stepped(worker, 0.0, 0.0, 0.0)
        admission.granted(worker, [AccountTurn("b", 0, 0.0, 1, 50.0, 20.0)], LetIn(), 1000.0)
    # The two do 2,000 ms a second. b has 500 ms waiting, and sends each of them 200 ms a second.
    predicted = admission.predicted_wait_seconds(Waiter("m", "a", cost_ms=1000.0), 1000.0)
    assert predicted == pytest.approx((1.0 + 0.5) / (2 - 0.4), rel=0.01)
    admission.worker_gone("w2", 1000.0)
    predicted = admission.predicted_wait_seconds(Waiter("m", "a", cost_ms=1000.0), 1000.0)
    assert predicted == pytest.approx((1.0 + 0.5) / (1 - 0.2), rel=0.01)


def test_what_others_will_ask_for_until_then_is_waited_for_too() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.stepped("w", 0.0, 0.0, 0.0)
    for index in range(1000):  # 400 ms a second, for a long time, and none of it waits now
        admission.pass_by(Waiter("m", "small", cost_ms=40.0), index / 10)
    for _ in range(10):
        admission.enter(Waiter("m", "greedy", cost_ms=200.0), 99.0)
    newcomer = Waiter("m", "greedy", cost_ms=200.0)
    predicted = admission.predicted_wait_seconds(newcomer, 100.0)
    assert predicted == pytest.approx(2.0 / (1 - 0.4), rel=0.05)
    first = admission.predicted_wait_seconds(Waiter("m", "new", ServiceClass.PRIORITY, cost_ms=1.0), 100.0)
    assert first == 0, "those go before it whose class is lower"
    batch = admission.predicted_wait_seconds(Waiter("m", "new", ServiceClass.BATCH, cost_ms=1.0), 100.0)
    assert batch is not None and predicted is not None and batch > predicted


def test_its_own_length_does_not_keep_a_request_out() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.stepped("w", 0.0, 0.0, 0.0)
    for _ in range(10):
        admission.enter(Waiter("m", "a", cost_ms=700.0), 0.0)
    late = [
        admission.too_late_seconds(Waiter("m", "a", cost_ms=cost_ms), Budget(wait_seconds, None), 30.0, 0.0)
        for cost_ms in (1.0, 50_000.0)
        for wait_seconds in (3.51, 3.49)
    ]
    assert late == [None, pytest.approx(7.0), None, pytest.approx(7.0)], "half is for what is unknown"
    batch = Waiter("m", "a", ServiceClass.BATCH)
    assert admission.too_late_seconds(batch, Budget(1.0, None), 30.0, 0.0) is None


def test_a_burst_after_a_lull_is_let_wait_until_the_rate_is_that_of_the_burst() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.stepped("w", 0.0, 0.0, 0.0)
    waiting = [Waiter("m", "a", cost_ms=700.0) for _ in range(10)]
    for waiter in waiting:
        admission.enter(waiter, 0.0)
    newcomer = Waiter("m", "a", cost_ms=1.0)
    assert admission.too_late_seconds(newcomer, Budget(3.6, None), 30.0, 0.0) is None, "seven seconds by its price"
    for waiter in waiting[:4]:
        admission.leave(waiter, 1.0)
        admission.let_in(waiter, 700.0, 1.0)
    predicted = admission.predicted_wait_seconds(newcomer, 1.0)
    assert predicted is not None and predicted < 3.0, "the device does more than a second's work in a second"
    for part, is_late in ((0.51, True), (0.49, False)):
        late = admission.too_late_seconds(newcomer, Budget(predicted / part, None), 30.0, 1.0)
        assert (late is not None) == is_late


def test_what_is_let_in_while_nobody_waits_does_not_count_as_the_rate() -> None:
    admission = ModelAdmission(BOUNDS)
    now = 0.0
    for _ in range(8):  # each waits for a second, and then nobody for nine
        waiter = Waiter("m", "a", cost_ms=100.0)
        admission.enter(waiter, now)
        admission.leave(waiter, now + 1)
        admission.let_in(waiter, 100.0, now + 1)
        now += 10
    assert admission.predicted_wait_seconds(Waiter("m", "a", cost_ms=100.0), now) == pytest.approx(0.5, rel=0.1)


def test_the_rate_follows_the_capacity() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.enter(Waiter("m", "a", cost_ms=100.0), 0.0)
    for index in range(1200):  # ten a second for a minute, then one a second
        now = index / 10 if index < 600 else 60.0 + (index - 600)
        admission.let_in(Waiter("m", "a", cost_ms=100.0, order=0), 0.0, now)
        if index == 599:
            assert admission.predicted_wait_seconds(Waiter("m", "b", 1, cost_ms=100.0), now) == pytest.approx(0.05, 0.2)
    assert admission.predicted_wait_seconds(Waiter("m", "b", 1, cost_ms=100.0), now) == pytest.approx(0.5, 0.2)


def _wait_for(admission: ModelAdmission, from_seconds: float, until_seconds: float) -> None:
    """Let a request wait so long, and start then."""
    waiter = Waiter("m", "a", cost_ms=10.0)
    admission.enter(waiter, from_seconds)
    admission.leave(waiter, until_seconds)
    admission.let_in(waiter, 10.0, until_seconds)


def _predicted_of_a_burst(admission: ModelAdmission, now: float) -> float | None:
    """Forty requests come; four are let in within half a second. Return the wait of another one then."""
    waiting = [Waiter("m", "a", cost_ms=10.0) for _ in range(40)]
    for waiter in waiting:
        admission.enter(waiter, now)
    for waiter in waiting[:4]:
        admission.leave(waiter, now + 0.5)
        admission.let_in(waiter, 10.0, now + 0.5)
    return admission.predicted_wait_seconds(Waiter("m", "a", cost_ms=10.0), now + 0.5)


def test_what_waited_while_a_worker_hung_says_nothing_of_a_burst_later() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.stepped("w", 0.0, 0.0, 0.0)
    for _ in range(4):
        _wait_for(admission, 0.0, 8.0)
    assert _predicted_of_a_burst(admission, 20.0) == pytest.approx(36.5 / 8)


def test_time_without_a_worker_does_not_count_as_its_slowness() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.stepped("w", 0.0, 0.0, 0.0)
    admission.worker_gone("w", 0.0)
    waiting = [Waiter("m", "a", cost_ms=10.0) for _ in range(5)]
    for waiter in waiting:
        admission.enter(waiter, 0.0)
    assert admission.predicted_wait_seconds(waiting[4], 15.0) is None, "who waits for a worker may wait"
    admission.stepped("w", 0.0, 0.0, 20.0)
    assert _predicted_of_a_burst(admission, 20.0) == pytest.approx(41.5 / 8)


def test_a_hang_between_two_that_are_let_in_is_no_measure_of_the_rate() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.stepped("w", 0.0, 0.0, 0.0)
    for _ in range(60):
        admission.enter(Waiter("m", "a", cost_ms=10.0), 0.0)

    def let_in_at(now: float) -> float | None:
        waiter = admission.first()
        assert waiter is not None
        admission.leave(waiter, now)
        admission.let_in(waiter, 10.0, now)
        return admission.predicted_wait_seconds(Waiter("m", "a", cost_ms=10.0), now)

    for number in range(10):
        regular = let_in_at(0.25 * (number + 1))
    assert regular == pytest.approx(50.5 / 4, rel=0.05)
    hung = let_in_at(12.5)
    assert hung is not None and regular is not None and hung < 2 * regular, "ten seconds are no ten seconds' work"


def test_slow_workers_are_known_to_be_slow_after_some_requests() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.stepped("w", 0.0, 0.0, 0.0)
    for _ in range(60):
        admission.enter(Waiter("m", "a", cost_ms=10.0), 0.0)
    for number in range(12):
        waiter = admission.first()
        assert waiter is not None
        admission.leave(waiter, 5.0 * (number + 1))
        admission.let_in(waiter, 10.0, 5.0 * (number + 1))
    predicted = admission.predicted_wait_seconds(Waiter("m", "a", cost_ms=10.0), 60.0)
    assert predicted == pytest.approx(48.5 * 5, rel=0.1), "one in five seconds"
