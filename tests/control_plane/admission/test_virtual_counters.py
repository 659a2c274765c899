"""Each account gets its part of the devices, whatever it asks for and whenever it comes."""

from __future__ import annotations

from collections import Counter

import pytest

from control_plane.admission.model_admission import Bounds, ModelAdmission, Waiter
from control_plane.admission.service_classes import ServiceClass, class_of
from control_plane.admission.virtual_counters import VirtualCounters

BOUNDS = Bounds(1000, 1000)


def serve(admission: ModelAdmission, num: int, cost_of: dict[str, float], now: float = 0.0) -> Counter[str]:
    """Let in the next requests; each costs its account what a request of the account costs. Return the costs."""
    served: Counter[str] = Counter()
    for _ in range(num):
        waiter = admission.first()
        assert waiter is not None
        admission.leave(waiter, now)
        admission.let_in(waiter, cost_of[waiter.account], now)
        served[waiter.account] += int(cost_of[waiter.account])
    return served


def test_accounts_with_dear_and_cheap_requests_get_equal_device_time() -> None:
    admission = ModelAdmission(BOUNDS)
    for index in range(300):
        admission.enter(Waiter("m", "greedy"), index)
        if index < 30:
            admission.enter(Waiter("m", "dear"), index)
    served = serve(admission, 200, {"greedy": 10, "dear": 100})
    assert abs(served["greedy"] - served["dear"]) <= 100


def test_an_idle_account_rejoins_at_the_least_counter_of_those_that_wait() -> None:
    counters = VirtualCounters()
    counters.arrive("a")
    counters.arrive("b")
    for account, used_ms in (("a", 500.0), ("b", 300.0), ("idle", 10.0)):
        counters.charge(account, used_ms)
    counters.arrive("idle")
    assert (counters.of("a"), counters.of("b"), counters.of("idle")) == (500, 300, 300)
    counters.arrive("idle")
    counters.charge("idle", -50.0)
    counters.leave("idle")
    counters.arrive("idle")
    assert counters.of("idle") == 250, "it waited all the while: nothing lifts it"


def test_debt_is_carried_through_idleness() -> None:
    counters = VirtualCounters()
    counters.arrive("a")
    counters.leave("a")
    counters.let_in("a")
    counters.charge("a", 1000.0)
    counters.arrive("b")
    assert counters.of("b") == 0
    counters.arrive("a")
    assert counters.of("a") == 1000


def test_whoever_comes_while_nobody_waits_rejoins_where_the_last_one_was() -> None:
    counters = VirtualCounters()
    counters.charge("busy", 5000.0)
    counters.let_in("busy")
    counters.arrive("new")
    assert counters.of("new") == 5000


def test_a_bounded_number_of_accounts_is_kept_and_none_that_waits_is_dropped() -> None:
    counters = VirtualCounters(max_kept=10)
    counters.charge("waits", 7.0)
    counters.arrive("waits")
    for index in range(100):
        counters.charge(f"account-{index}", 1.0)
    assert len(counters) == 10
    assert counters.of("waits") == 7


def test_a_class_goes_before_the_classes_below_and_moving_requests_before_all() -> None:
    admission = ModelAdmission(BOUNDS)
    names = {}
    for name, service_class in (("batch", -1), ("default", 0), ("priority", 1)):
        names[name] = Waiter("m", name, service_class)
        admission.enter(names[name], 0.0)
    moving = Waiter("m", "moving", ServiceClass.BATCH, is_moving=True)
    admission.enter(moving, 0.0)
    order = []
    while (first := admission.first()) is not None:
        order.append(first.account)
        admission.leave(first, 0.0)
    assert order == ["moving", "priority", "default", "batch"]
    assert len(admission) == 0


@pytest.mark.parametrize(
    ("waiting", "comes", "must_wait"),
    [(-1, 0, False), (0, 0, True), (1, 0, True), (0, 1, False), (0, -1, True)],
)
def test_a_newcomer_waits_behind_its_own_class_and_higher_ones(waiting: int, comes: int, must_wait: bool) -> None:
    admission = ModelAdmission(BOUNDS)
    assert not admission.must_wait(Waiter("m", "a", comes))
    admission.enter(Waiter("m", "b", waiting), 0.0)
    assert admission.must_wait(Waiter("m", "a", comes)) == must_wait
    assert not admission.must_wait(Waiter("m", "a", comes, is_moving=True))


def test_a_request_that_the_workers_did_not_take_is_not_charged() -> None:
    admission = ModelAdmission(BOUNDS)
    waiter = Waiter("m", "a")
    admission.enter(waiter, 0.0)
    admission.leave(waiter, 1.0)
    admission.let_in(waiter, 100.0, 1.0)
    admission.take_back(waiter, 100.0)
    assert admission.counters.of("a") == 0
    assert admission.predicted_wait_seconds(Waiter("m", "a", 0, cost_ms=1.0), 2.0) is None


def test_answers_are_charged_as_their_tokens_come() -> None:
    admission = ModelAdmission(BOUNDS)
    meter = admission.started(Waiter("m", "a"), 100, 50.0, 2.0)
    meter.answered(10)
    meter.answered(1)
    assert admission.counters.of("a") == 22


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

    # about 500 ms a second: 8 wait
    assert wait_of("greedy", 0) == pytest.approx(900 / 500, rel=0.1)
    assert wait_of("small", 0) == pytest.approx(200 / 500, rel=0.1), "two accounts take turns"
    assert wait_of("small", 1) == pytest.approx(100 / 500, rel=0.1), "none of its class waits"


def test_what_is_let_in_while_nobody_waits_does_not_count_as_the_rate() -> None:
    admission = ModelAdmission(BOUNDS)
    now = 0.0
    for _ in range(8):  # each waits for a second, and then nobody for a hundred
        waiter = Waiter("m", "a", cost_ms=100.0)
        admission.enter(waiter, now)
        admission.leave(waiter, now + 1)
        admission.let_in(waiter, 100.0, now + 1)
        now += 100
    assert admission.predicted_wait_seconds(Waiter("m", "a", cost_ms=100.0), now) == pytest.approx(1.0, rel=0.1)


def test_the_rate_follows_the_capacity() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.enter(Waiter("m", "a", cost_ms=100.0), 0.0)
    for index in range(1200):  # ten a second for a minute, then one a second
        now = index / 10 if index < 600 else 60.0 + (index - 600)
        admission.let_in(Waiter("m", "a", cost_ms=100.0, order=0), 0.0, now)
        if index == 599:
            assert admission.predicted_wait_seconds(Waiter("m", "b", 1, cost_ms=100.0), now) == pytest.approx(0.1, 0.2)
    assert admission.predicted_wait_seconds(Waiter("m", "b", 1, cost_ms=100.0), now) == pytest.approx(1.0, 0.2)


def test_who_may_ask_for_which_class() -> None:
    assert class_of("", "a", ("*",)) == class_of("scale", "a", ("*",)) == ServiceClass.DEFAULT
    assert class_of("flex", "a", ()) == class_of("batch", "a", ("a",)) == ServiceClass.BATCH
    assert class_of("priority", "a", ("b",)) == ServiceClass.DEFAULT
    assert class_of("priority", "a", ("a",)) == class_of("priority", "b", ("*",)) == ServiceClass.PRIORITY
