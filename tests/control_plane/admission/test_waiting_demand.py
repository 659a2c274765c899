"""Workers hear of what waits by class and account; prefill workers of the prompts that they would compute."""

from __future__ import annotations

import pytest

from control_plane.admission.model_admission import Waiter
from control_plane.admission.waiting_demand import MOVING, AccountDemand, PrefillShare, WaitingDemand


def used(service_class: int, account: str) -> float:
    """Accounts have used what their names say."""
    return float(ord(account))


def waiter(num_tokens: int, num_prefill_tokens: int | None, account: str = "a", num_choices: int = 1) -> Waiter:
    return Waiter(
        "m",
        account,
        num_tokens=num_tokens,
        num_choices=num_choices,
        num_prefill_tokens=num_prefill_tokens,
        work=float(num_tokens),
        came_at=5.0,
    )


def of(*waiting: Waiter, share: PrefillShare | None = None) -> WaitingDemand:
    return WaitingDemand.of_prompts(waiting, waiting[0] if waiting else None, used, share or PrefillShare())


def demand_of(
    account: str, num_requests: int, work: float, since: float = 5.0, service_class: int = 0
) -> AccountDemand:
    return AccountDemand(account, service_class, num_requests, work, since)


def test_each_prompt_counts_once_with_what_would_be_computed_of_it() -> None:
    demand = of(waiter(100, 60, num_choices=4), waiter(50, 50, "b"), waiter(1000, 0, "c"))
    assert demand == WaitingDemand(110, 2, 60, 1, (demand_of("a", 1, 100.0), demand_of("b", 1, 50.0)))


def test_requests_are_told_by_class_and_account_in_the_order_of_their_turns() -> None:
    waiting = [waiter(100, None, "c"), waiter(50, None, "b", num_choices=3), waiter(20, None, "b")]
    waiting[2].came_at = 4.0
    urgent, moving, batch = waiter(1, None, "c"), waiter(2, None, "d"), waiter(3, None, "a")
    urgent.service_class, moving.is_moving, batch.service_class = 1, True, -1
    demand = WaitingDemand.of([*waiting, urgent, moving, batch], moving, used)
    assert demand.accounts == (
        demand_of("d", 1, 2.0, service_class=MOVING),
        demand_of("c", 1, 1.0, service_class=1),
        demand_of("b", 4, 70.0, since=4.0),
        demand_of("c", 1, 100.0),
        demand_of("a", 1, 3.0, service_class=-1),
    )
    assert (demand.num_tokens, demand.num_requests, demand.first_tokens) == (276, 8, 2)


def test_of_many_accounts_those_are_told_that_are_next() -> None:
    waiting = [waiter(10, None, chr(ord("z") - number)) for number in range(20)]
    demand = WaitingDemand.of(waiting, waiting[0], used)
    assert [each.account for each in demand.accounts] == [chr(ord("g") + number) for number in range(16)]
    assert demand.num_requests == 20


def test_workers_hear_when_the_request_that_waits_longest_is_another() -> None:
    first, second = waiter(100, None), waiter(100, None)
    before = WaitingDemand.of([first, second], first, used)
    assert not WaitingDemand.of([first, second], first, used).differs(before)
    second.came_at = 4.0
    assert WaitingDemand.of([first, second], first, used).differs(before)


def test_nothing_that_decode_would_compute_counts() -> None:
    assert of(waiter(100, 0), waiter(50, 0)) == of() == WaitingDemand()
    demand = of(waiter(100, 0), waiter(30, 30), waiter(50, 50))
    assert (demand.num_requests, demand.first_tokens) == (2, 40), "which of them is next is not known"


def test_requests_that_have_not_looked_count_as_the_last_ones_that_were_sent() -> None:
    share = PrefillShare()
    new = [waiter(100, None) for _ in range(10)]
    assert of(*new, share=share) == WaitingDemand(1000, 10, 100, 1, (demand_of("a", 10, 1000.0),)), "at first: all"
    for _ in range(50):
        share.sent(0, 100)
        share.sent(50, 100)
    demand = of(*new, share=share)
    assert demand.num_requests == 5
    assert demand.num_tokens == pytest.approx(250, abs=20) and demand.first_tokens == 100
    for _ in range(50):
        share.sent(0, 100)
    assert of(*new, share=share) == WaitingDemand()
    assert of(waiter(100, 100), *new, share=share).num_requests == 1
