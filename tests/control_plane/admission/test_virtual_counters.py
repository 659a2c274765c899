"""Each account gets its part of the devices, whatever it asks for and whenever it comes."""

from __future__ import annotations

from collections import Counter

import pytest

from control_plane.admission.elsewhere import AccountTurn, LetIn
from control_plane.admission.model_admission import Bounds, ModelAdmission, Waiter
from control_plane.admission.service_classes import ServiceClass, class_of
from tandem_runtime.demands import Demands
from tandem_runtime.virtual_counters import VirtualCounters

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


def test_an_account_that_looked_for_room_in_vain_keeps_its_counter() -> None:
    counters = VirtualCounters()
    counters.charge("a", 500.0)
    counters.let_in("a")
    counters.charge("looks", -300.0)
    counters.arrive("looks", is_back=True)
    assert counters.of("looks") == 200.0
    counters.leave("looks")
    counters.arrive("looks")
    assert counters.of("looks") == 500.0, "it was idle"


def test_what_an_account_uses_in_one_class_is_no_debt_and_no_credit_in_another() -> None:
    admission, now = ModelAdmission(BOUNDS), 0.0
    for account in ("both", "lowest"):
        admission.enter(Waiter("m", account, -1), now)
    for account in ("both", "other"):
        admission.enter(Waiter("m", account), now)
    for _ in range(50):
        admission.let_in(Waiter("m", "both", 1, order=0), 100.0, now)
        admission.let_in(Waiter("m", "both", order=0), 100.0, now)
        admission.let_in(Waiter("m", "other", order=0), 100.0, now)
    counters = admission.counters
    assert counters[0].of("both") == counters[0].of("other") > 0.0
    admission.pass_by(Waiter("m", "other", 1), now)
    assert counters[0].of("other") == counters[0].of("both"), "a request of another class"
    admission.pass_by(Waiter("m", "idle"), now)
    assert counters[0].of("idle") == counters[0].of("both"), "the lowest class waits with its counters"
    assert counters[-1].of("both") == counters[-1].of("lowest") == 0.0


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
    admission.take_back(waiter)
    assert admission.counters[0].of("a") == 0
    assert admission.predicted_wait_seconds(Waiter("m", "a", 0, cost_ms=1.0), 2.0) is None


def test_an_answer_is_charged_in_advance_as_long_as_predicted_and_then_as_long_as_it_is() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.stepped("w", 1.0, 500, 0.0)
    waiter = Waiter("m", "a", num_answer_tokens=10)
    admission.let_in(waiter, 50.0, 0.0)
    assert admission.counters[0].of("a") == 50 + 10 * 2
    meter = admission.started(waiter, 100, 50.0)
    meter.answered(8)
    assert admission.counters[0].of("a") == 70, "paid in advance"
    meter.answered(3)
    meter.ended()
    assert admission.counters[0].of("a") == 72
    short = admission.started(Waiter("m", "a", num_answer_tokens=10), 100, 50.0)
    short.answered(4)
    short.ended()
    short.ended()
    assert admission.counters[0].of("a") == 72 - 6 * 2


def test_what_an_account_has_used_at_other_gateways_counts_here_too() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.stepped("w", 1.0, 500, 0.0)
    for account in ("a", "b"):
        admission.enter(Waiter("m", account), 0.0)
    admission.used_elsewhere(0, "a", 0, 100)
    admission.used_elsewhere(0, "stranger", 0, 100)
    assert (admission.counters[0].of("a"), admission.counters[0].of("b")) == (200, 0)
    assert len(admission.counters[0]) == 2, "who has not asked here is not kept"
    first = admission.first()
    assert first is not None and first.account == "b"


def test_what_was_used_elsewhere_while_nobody_waits_here_puts_nobody_in_debt() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.stepped("w", 1.0, 500, 0.0)
    admission.pass_by(Waiter("m", "a"), 0.0)
    for _ in range(10):
        admission.used_elsewhere(0, "a", 0, 100)
    for account in ("b", "a"):
        admission.enter(Waiter("m", account), 0.0)
    assert admission.counters[0].of("a") == 2000
    assert admission.counters[0].of("b") == pytest.approx(1800), "it rejoins where the other was last"


def test_who_was_let_in_does_not_have_the_next_turn_too_before_it_has_any_token() -> None:
    admission = ModelAdmission(BOUNDS)
    for index in range(8):
        admission.enter(Waiter("m", "ab"[index % 2], num_answer_tokens=100), 0.0)
    served = []
    for _ in range(4):
        waiter = admission.first()
        assert waiter is not None
        admission.leave(waiter, 1.0)
        admission.let_in(waiter, 1.0, 1.0)
        served.append(waiter.account)
    assert served == ["a", "b", "a", "b"]


def test_the_first_report_makes_what_was_charged_at_an_assumed_price_right() -> None:
    admission = ModelAdmission(BOUNDS)
    admission.let_in(Waiter("m", "a", num_answer_tokens=10), 0.0, 0.0)
    waiting = Waiter("m", "b", cost_ms=80.0)
    admission.enter(waiting, 0.0)
    before = admission.counters[0].of("a")
    assert before > 0
    admission.stepped("w", 0.0, 0.0, 0.0)  # nothing ran yet
    assert admission.counters[0].of("a") == before
    assumed_ms = admission.prices.ms_per_answer_token
    admission.stepped("w", 1.0, 500, 0.0)
    assert admission.counters[0].of("a") == pytest.approx(10 * 2)
    admission.counters[0].charge("b", 20.0)
    predicted = admission.predicted_wait_seconds(Waiter("m", "b"), 0.0)
    assert predicted == pytest.approx((80.0 / assumed_ms) * 2 / 1000), "what waits is as much work as before"
    admission.stepped("w", 3.0, 500, 0.0)
    assert admission.counters[0].of("a") == pytest.approx(10 * 2), "a later price is for later tokens"


def test_leads_of_the_workers_make_the_order_and_the_account_that_is_next_here_keeps_its_counter() -> None:
    counters = VirtualCounters()
    for account in ("x", "y"):
        counters.arrive(account)
    counters.charge("x", 500.0)
    counters.follow({"x": 20.0, "y": 300.0, "elsewhere": 0.0})
    assert [counters.of(account) for account in ("x", "y", "elsewhere")] == [500.0, 780.0, 480.0]
    counters.leave("x")
    counters.leave("y")
    counters.follow({"x": 0.0, "y": 0.0})
    assert counters.of("y") == 780.0, "nothing waits here: the next report comes when something does"


def test_at_several_workers_an_account_is_ahead_by_what_it_is_ahead_at_all_of_them() -> None:
    admission = ModelAdmission(BOUNDS)
    for account in ("x", "y"):
        admission.enter(Waiter("m", account, cost_ms=10.0), 0.0)

    def grant(worker: str, **leads: float) -> None:
        turns = [AccountTurn(account, 0, lead, 1, 1.0, 0.0) for account, lead in leads.items()]
        admission.granted(worker, turns, LetIn(), 0.0)

    def first() -> str:
        waiter = admission.first()
        assert waiter is not None
        return waiter.account

    grant("w1", x=0.0, y=300.0)
    assert first() == "x"
    grant("w2", x=400.0, y=0.0)
    assert first() == "y"
    admission.worker_gone("w2", 0.0)
    grant("w1", x=0.0, y=200.0)
    assert first() == "x"


def test_who_may_ask_for_which_class() -> None:
    assert class_of("", "a", ("*",)) == class_of("scale", "a", ("*",)) == ServiceClass.DEFAULT
    assert class_of("flex", "a", ()) == class_of("batch", "a", ("a",)) == ServiceClass.BATCH
    assert class_of("priority", "a", ("b",)) == ServiceClass.DEFAULT
    assert class_of("priority", "a", ("a",)) == class_of("priority", "b", ("*",)) == ServiceClass.PRIORITY


def test_what_an_account_asks_for_is_forgotten_and_so_are_accounts_beyond_a_number() -> None:
    demands = Demands(max_kept=3)

    def rate(now: float) -> float:
        return dict(demands.rates(now)).get((0, "a"), 0.0)

    for index in range(20_000):  # longer than all sums are kept in one unit
        demands.asked((0, "a"), 20.0, index / 10)
        if index in (100, 500):
            assert rate(index / 10) == pytest.approx(200, rel=0.05)
    assert rate(2000.0) == pytest.approx(200, rel=0.05)
    assert rate(2020.0) == pytest.approx(50, rel=0.05)
    assert rate(9000.0) == 0
    demands.scale(0.5)
    assert rate(2020.0) == pytest.approx(25, rel=0.05)
    for name in ("b", "c", "d"):
        demands.asked((0, name), 1.0, 2020.0)
    assert [account for (_, account), _ in demands.rates(2020.0)] == ["b", "c", "d"]
