"""One queue for all gateways: classes, then accounts by what they have used, then requests by how long they wait."""

from __future__ import annotations

import pytest

from tandem_worker.account_order import REST_CLASS, AccountDemand, AccountOrder


def served(order: AccountOrder[str], num: int, now: float = 10.0) -> list[str]:
    """Return the gateways whose turns the next ones are."""
    turns, found = order.turns(now), list[str]()
    while len(found) < num and (key := turns.next()) is not None:
        found.append(key)
        turns.took(1)
    return found


def test_the_account_that_has_used_least_is_next_whichever_gateways_it_asks() -> None:
    order: AccountOrder[str] = AccountOrder()
    order.demanded("a", [AccountDemand("greedy", num_requests=4, work=400.0)], 0.0)
    order.demanded("b", [AccountDemand("small", num_requests=4, work=400.0)], 0.0)
    order.let_in("a", "greedy", 250.0, 0.0)
    assert served(order, 8) == ["b", "b", "b", "a", "b", "a", "a", "a"]


def test_requests_of_one_account_have_their_turns_as_they_came() -> None:
    order: AccountOrder[str] = AccountOrder()
    order.demanded("a", [AccountDemand("x", num_requests=2, waited_seconds=4.0)], 8.5)
    order.demanded("b", [AccountDemand("x", num_requests=5, waited_seconds=3.0)], 8.0)
    assert served(order, 8) == ["a", "b", "b", "b", "a", "b", "b"], "5.5, 5, 4, 3, 2.75, 2 and 1 s"


def test_requests_that_came_at_once_at_two_gateways_are_served_in_turn() -> None:
    order: AccountOrder[str] = AccountOrder()
    order.demanded("a", [AccountDemand("x", num_requests=30)], 10.0)
    order.demanded("b", [AccountDemand("x", num_requests=10)], 10.0)
    assert served(order, 8).count("b") == 2


def test_a_higher_class_is_first_and_requests_of_which_nothing_is_told_are_last() -> None:
    order: AccountOrder[str] = AccountOrder()
    order.demanded("a", [AccountDemand("x", -1), AccountDemand("", -1000)], 0.0)
    order.demanded("b", [AccountDemand("x", 0), AccountDemand("y", 1)], 0.0)
    order.let_in("b", "y", 1e6, 0.0)
    assert served(order, 4) == ["b", "b", "a", "a"]


def test_a_gateway_that_takes_nothing_more_is_passed() -> None:
    order: AccountOrder[str] = AccountOrder()
    order.demanded("a", [AccountDemand("x"), AccountDemand("y")], 0.0)
    order.demanded("b", [AccountDemand("x")], 0.0)
    turns = order.turns(1.0)
    turns.skip("a")
    assert turns.next() == "b"
    turns.took(1)
    assert turns.next() is None


def test_who_does_not_use_its_turn_is_behind_the_others() -> None:
    order: AccountOrder[str] = AccountOrder()
    order.demanded("a", [AccountDemand("x", work=10.0, waited_seconds=9.0)], 0.0)
    order.demanded("b", [AccountDemand("x", work=10.0), AccountDemand("y", work=10.0)], 0.0)
    assert served(order, 1) == ["a"]
    order.passes("a", 1, 1.0)
    assert served(order, 3) == ["b", "b", "a"]
    order.passes("nobody", 1, 1.0)


def test_an_account_that_did_not_wait_has_no_credit_and_keeps_its_debt() -> None:
    order: AccountOrder[str] = AccountOrder()
    order.demanded("a", [AccountDemand("x", num_requests=9, work=900.0)], 0.0)
    order.let_in("a", "x", 5000.0, 0.0)
    order.demanded("b", [AccountDemand("y", num_requests=9, work=900.0)], 1.0)
    assert [turn.lead for turn in order.told("a", 1e6)] == [0.0, 0.0]
    order.let_in("b", "y", 400.0, 1.0)
    order.demanded("b", [], 2.0)
    assert order.told("a", 1e6) == [], "no other gateway waits"
    order.demanded("b", [AccountDemand("y", num_requests=9, work=900.0)], 3.0)
    assert [(turn.account, turn.lead) for turn in order.told("a", 1e6)] == [("x", 0.0), ("y", 400.0)]
    order.let_in("b", "idle", 1.0, 4.0)
    order.charge("idle", -9000.0)
    assert [turn.lead for turn in order.told("a", 5.0)] == [0.0, 0.0, 400.0], "who waits next has no credit"
    order.charge("y", -400.0)
    assert {turn.lead for turn in order.told("a", 1e6)} == {0.0}, "it was given back"


def test_a_gateway_hears_of_what_waits_elsewhere_by_class_and_account() -> None:
    order: AccountOrder[str] = AccountOrder()
    for name in "abc":
        order.demanded(name, [AccountDemand("x", 0, 2, 20.0), AccountDemand("x", 1, 1, 5.0)], 0.0)
    found = [(t.account, t.service_class, t.num_elsewhere, t.work_elsewhere) for t in order.told("a", 1e6)]
    assert found == [("x", 1, 2, 10.0), ("x", 0, 4, 40.0)]
    order.demanded("a", [], 0.0)
    assert [turn.num_elsewhere for turn in order.told("a", 1e6)] == [2, 4]


def test_a_gateway_hears_of_a_bounded_number_of_accounts_those_that_are_next() -> None:
    order: AccountOrder[str] = AccountOrder()
    order.demanded("a", [AccountDemand("x")], 0.0)
    order.demanded("b", [AccountDemand(f"y{number}") for number in range(200)], 0.0)
    for number in range(200):
        order.let_in("b", f"y{number}", float(200 - number), 0.0)
    told = order.told("a", 1e6)
    assert len(told) == 64 and told[0].account == "x" and told[1].account == "y199"


def test_a_gateway_hears_what_others_send_although_nothing_of_it_waits_now() -> None:
    order: AccountOrder[str] = AccountOrder()
    for second in range(60):
        order.let_in("a", "x", 10.0, float(second))
        order.let_in("b", "x", 20.0, float(second))
        order.let_in("b", "y", 30.0, float(second), 1)
    order.demanded("a", [AccountDemand("x")], 60.0)
    order.demanded("b", [AccountDemand("x")], 60.0)

    def rates(gateway: str) -> dict[tuple[str, int], float]:
        told = order.told(gateway, 60.0)
        return {(turn.account, turn.service_class): turn.work_per_second_elsewhere for turn in told}

    assert rates("a") == pytest.approx({("x", 0): 20.0, ("y", 1): 30.0}, rel=0.05)
    assert rates("b") == pytest.approx({("x", 0): 10.0, ("y", 1): 0.0}, rel=0.05)
    order.forget("b")
    order.demanded("c", [AccountDemand("x")], 60.0)
    assert rates("c") == pytest.approx({("x", 0): 30.0, ("y", 1): 30.0}, rel=0.05), "what has left has been sent"


def test_what_an_account_used_while_nothing_waited_is_no_debt_to_one_that_was_idle() -> None:
    order: AccountOrder[str] = AccountOrder()
    order.let_in("b", "y", 100.0, 0.0)
    for second in range(1000):
        order.let_in("a", "x", 100.0, float(second))
    for _ in range(5):
        order.let_in("b", "y", 100.0, 1000.0)
    order.demanded("b", [AccountDemand("y", num_requests=9, work=900.0)], 1001.0)
    order.demanded("a", [AccountDemand("x", num_requests=9, work=900.0)], 1001.0)
    leads = {turn.account: turn.lead for turn in order.told("a", 1001.0)}
    assert leads == {"x": 0.0, "y": 0.0}


def test_what_is_never_served_lets_nobody_rejoin_with_credit() -> None:
    order: AccountOrder[str] = AccountOrder()
    order.let_in("a", "idle", 1.0, 0.0)
    order.demanded("a", [AccountDemand("x"), AccountDemand("", REST_CLASS), AccountDemand("lowest", -1)], 0.0)
    order.demanded("b", [AccountDemand("y")], 0.0)
    for second in range(100):
        order.let_in("a", "x", 10.0, float(second))
        order.let_in("b", "y", 10.0, float(second))
    order.demanded("b", [AccountDemand("y"), AccountDemand("idle")], 100.0)
    leads = {turn.account: turn.lead for turn in order.told("a", 100.0)}
    assert leads["idle"] == leads["x"] == leads["y"]


def test_what_a_gateway_sent_before_another_came_is_not_taken_for_more() -> None:
    order: AccountOrder[str] = AccountOrder()
    for second in range(100):
        order.let_in("a", "x", 10.0, float(second))
        if second >= 98:
            order.let_in("b", "x", 10.0, float(second))
    order.demanded("a", [AccountDemand("x")], 100.0)
    order.demanded("b", [AccountDemand("x")], 100.0)
    (turn,) = order.told("b", 100.0)
    assert turn.work_per_second_elsewhere == pytest.approx(10.0, rel=0.05)


def test_what_an_account_uses_in_another_class_changes_no_turn() -> None:
    order: AccountOrder[str] = AccountOrder()
    for _ in range(100):
        order.let_in("a", "urgent", 100.0, 0.0, 1)
    order.demanded("a", [AccountDemand("x"), AccountDemand("urgent", 1)], 0.0)
    order.demanded("b", [AccountDemand("y")], 0.0)
    order.let_in("a", "x", 1.0, 0.0, 1)
    leads = {(turn.account, turn.service_class): turn.lead for turn in order.told("b", 1e6)}
    assert leads["x", 0] == leads["y", 0] == 0.0
