"""Gateways that keep to their grants never send a worker more than it has room for, and each gets its part of it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem_worker.account_order import AccountDemand
from tandem_worker.grants import RENEW_SECONDS, VALID_SECONDS, Demand, Grant, GrantDivider, Room
from tandem_worker.worker_room import SlowStart

ROOM = Room(1000, 10)
LATER = VALID_SECONDS + 1.0


def divider_of(*names: str) -> GrantDivider[str]:
    divider: GrantDivider[str] = GrantDivider()
    for name in names:
        divider.attach(name)
    return divider


def waits(num_requests: int, tokens_each: int = 50, **accounts: int) -> Demand:
    by_account = tuple(AccountDemand(name, num_requests=num) for name, num in accounts.items())
    return Demand(num_requests * tokens_each, num_requests, tokens_each, 1, by_account)


def test_one_gateway_has_all_the_room() -> None:
    assert divider_of("a").divide(ROOM, 0.0) == {"a": Grant(1, 1000, 10)}


def test_gateways_where_nothing_waits_have_equal_parts() -> None:
    grants = divider_of("a", "b", "c").divide(ROOM, 0.0)
    assert sorted(grant.num_requests for grant in grants.values()) == [3, 3, 4]
    assert sum(grant.num_tokens for grant in grants.values()) == 1000


def test_what_waits_comes_before_what_may_come_and_each_gateway_has_one_request_at_least() -> None:
    divider = divider_of("a", "b", "c")
    divider.demanded("a", waits(100), 0.0)
    grants = divider.divide(ROOM, 0.0)
    assert [grants[name].num_requests for name in "abc"] == [8, 1, 1]


def test_room_is_divided_by_what_waits_if_all_is_of_one_account() -> None:
    divider = divider_of("a", "b")
    divider.demanded("a", waits(60), 0.0)
    divider.demanded("b", waits(20), 0.0)
    grants = divider.divide(Room(10_000, 40), 0.0)
    assert [grants[name].num_requests for name in "ab"] == [30, 10]


def test_accounts_have_equal_parts_wherever_they_wait() -> None:
    divider = divider_of("a", "b")
    divider.demanded("a", waits(60, x=60), 0.0)
    divider.demanded("b", waits(80, x=60, y=20), 0.0)
    grants = divider.divide(Room(10_000, 40), 0.0)
    assert [grants[name].num_requests for name in "ab"] == [10, 30], "half of x; half of x, and y"


def test_a_grant_tells_what_waits_and_was_let_in_at_other_gateways() -> None:
    divider = divider_of("a", "b", "c")
    assert [grant.turns for grant in divider.divide(Room(10_000, 40), 0.0).values()] == [()] * 3, "none waits"
    divider.demanded("a", waits(60, x=60), 0.0)
    assert divider.divide(Room(10_000, 40), 1.0)["a"].turns == (), "nor elsewhere"
    divider.demanded("b", waits(80, x=60, y=20), 1.0)
    divider.let_in("b", "x", 7.0, 1.0)
    grants = divider.divide(Room(10_000, 40), 2.0)
    assert [(turn.account, turn.num_elsewhere) for turn in grants["a"].turns] == [("y", 20), ("x", 60)]
    assert [turn.lead for turn in grants["a"].turns] == [turn.lead for turn in grants["b"].turns] == [0.0, 7.0]
    assert [(turn.account, turn.num_elsewhere) for turn in grants["b"].turns] == [("y", 0), ("x", 60)]
    told = [(grants[name].work_elsewhere, grants[name].num_elsewhere) for name in "abc"]
    assert told == [(7.0, 1), (0.0, 0), (7.0, 1)]
    assert [turn.num_elsewhere for turn in grants["c"].turns] == [20, 120], "it may get the next request"
    divider.detach("b")
    divider.demanded("a", waits(60, x=60), 3.0)
    assert divider.divide(Room(10_000, 40), 3.0)["a"].turns == ()


def test_one_place_at_a_time_goes_to_the_account_that_has_used_least_and_there_to_who_waits_longest() -> None:
    divider, served = divider_of("a", "b"), list[str]()
    oldest = {("a", "x"): 0.0, ("b", "x"): 0.5, ("b", "y"): 3.0}
    for step in range(40):
        now = 4.0 + step
        for name in "ab":
            divider.seen(name, 1000)
            demands = [
                AccountDemand(account, num_requests=50, work=50.0, waited_seconds=now - since)
                for (gateway, account), since in oldest.items()
                if gateway == name
            ]
            divider.demanded(name, Demand(50 * 50, 50 * len(demands), 50, 1, tuple(demands)), now)
        grants = divider.divide(Room(1000, 1), now)
        (name,) = [name for name, grant in grants.items() if grant.num_requests > served.count(name)]
        account = "x" if name == "a" or served.count("b") % 3 == 1 else "y"
        divider.submitted(name, 50, now)
        divider.let_in(name, account, 1.0, now)
        oldest[name, account] += 1.0
        served.append(name)
    assert served.count("a") == 10, "half of the one account; the other account is at b alone"
    assert all(served[i : i + 4].count("a") == 1 for i in range(0, 40, 4))


def test_what_a_gateway_uses_is_granted_anew_and_numbers_grow() -> None:
    divider = divider_of("a", "b")
    before = divider.divide(ROOM, 0.0)["a"]
    for _ in range(4):
        divider.submitted("a", 50, 0.0)
    assert divider.divide(Room(800, 6), 0.0) == {}, "one is left to a, and five to b until it hears otherwise"
    after = divider.divide(Room(900, 9), 0.0)["a"]
    assert (after.number, after.num_requests) == (before.number + 1, 4 + 4)


def test_unused_room_goes_to_who_needs_it_once_the_other_has_seen_its_lower_grant() -> None:
    divider = divider_of("a", "b")
    divider.divide(ROOM, 0.0)
    divider.demanded("a", waits(100), 0.0)
    lower = divider.divide(ROOM, 0.0)
    assert lower["b"].num_requests == 1, "a waits, so b gives back"
    assert "a" not in lower, "b may have used it"
    divider.seen("b", 2)
    assert divider.divide(ROOM, 0.1)["a"].num_requests == 9


@pytest.mark.parametrize("in_order", [False, True])
def test_unused_room_is_free_again_when_the_grant_has_expired(in_order: bool) -> None:
    divider, room = divider_of("a", "b"), replace(ROOM, in_order=in_order)
    divider.divide(room, 0.0)
    divider.demanded("a", waits(100), 0.0)
    divider.divide(room, 0.0)
    divider.demanded("a", waits(100), LATER)
    assert divider.divide(room, LATER)["a"].num_requests == 9


def test_a_new_gateway_has_its_part_once_the_others_have_seen_that_they_have_less() -> None:
    divider = divider_of("a")
    divider.divide(ROOM, 0.0)
    divider.attach("b")
    grants = divider.divide(ROOM, RENEW_SECONDS / 10)
    assert grants["b"] == Grant(1, 0, 0), "a may have used it all"
    assert (grants["a"].num_tokens, grants["a"].num_requests) == (500, 5)
    divider.seen("a", 2)
    assert divider.divide(ROOM, RENEW_SECONDS / 5) == {"b": Grant(2, 500, 5)}


def test_a_gateway_that_left_gives_back_at_once() -> None:
    divider = divider_of("a", "b")
    divider.divide(ROOM, 0.0)
    divider.demanded("a", waits(100), 0.0)
    divider.detach("b")
    assert divider.divide(ROOM, 0.0)["a"] == Grant(2, 1000, 10)
    assert len(divider) == 1


def test_grants_are_renewed_and_otherwise_sent_only_if_they_say_something() -> None:
    divider = divider_of("a")
    divider.divide(ROOM, 0.0)
    assert divider.divide(ROOM, RENEW_SECONDS / 2) == {}
    assert divider.divide(ROOM, RENEW_SECONDS) == {"a": Grant(2, 1000, 10)}


@pytest.mark.parametrize(("num_workers", "seconds"), [(1, 0.2), (200, 0.4), (10_000, 1.0)])
def test_gateways_that_wait_hear_of_each_other_in_time_and_less_often_the_more_workers_tell(
    num_workers: int, seconds: float
) -> None:
    divider = divider_of("a", "b")
    for name in "ab":
        divider.demanded(name, replace(waits(50, x=50), num_workers=num_workers), 0.0)
    assert set(divider.divide(ROOM, 0.0)) == set("ab")
    assert divider.divide(ROOM, seconds - 0.01) == {}
    assert set(divider.divide(ROOM, seconds)) == set("ab")
    divider.demanded("b", Demand(), seconds)
    assert set(divider.divide(ROOM, 2 * seconds)) <= {"b"} or seconds == 1.0, "none is to be told of others"


def test_a_gateway_that_needs_nothing_for_some_seconds_gets_no_grants_until_it_does() -> None:
    divider = divider_of("idle", "busy")
    sent = {"idle": 0, "busy": 0}
    for tick in range(40):
        now = tick * RENEW_SECONDS / 2
        divider.submitted("busy", 10, now)
        for name, grant in divider.divide(ROOM, now).items():
            sent[name] += 1
            divider.seen(name, grant.number)
    assert sent["idle"] <= 7 and sent["busy"] >= 20
    # 1. A request comes without a grant. 2. Requests wait.
    divider.submitted("idle", 10, 20.0)
    assert divider.divide(ROOM, 20.0 + LATER)["idle"].num_requests >= 1
    divider = divider_of("idle")
    divider.divide(ROOM, 0.0)
    assert divider.divide(ROOM, 10.0) == {}
    divider.demanded("idle", waits(3), 10.0)
    assert divider.divide(ROOM, 10.0)["idle"].num_requests == 10


def test_a_large_request_is_passed_by_until_it_is_due_and_then_the_rest_is_kept_for_it() -> None:
    divider = divider_of("large", "small")
    room = Room(300, 5, most_tokens=2000)

    def serve(now: float) -> dict[str, Grant]:
        for name, demand in (("large", waits(1, 900)), ("small", waits(50, 100))):
            divider.seen(name, 1000)
            divider.demanded(name, demand, now)
        return divider.divide(room, now)

    assert serve(0.0)["small"].num_tokens == 300
    for _ in range(3):
        divider.submitted("small", 100, 0.0)
    assert serve(4.0)["small"].num_tokens == 600
    for _ in range(3):
        divider.submitted("small", 100, 4.0)
    kept = serve(6.0)
    assert kept["small"].num_tokens == 600, "nothing beyond what it has used"
    room = Room(1000, 5, most_tokens=2000)
    assert serve(7.0)["large"].num_tokens >= 900


def test_requests_that_pass_a_large_one_do_not_put_off_its_turn() -> None:
    divider = divider_of("both", "small")
    room = Room(300, 5, most_tokens=2000)
    for tick in range(7):
        for name, demand in (("both", waits(1, 900)), ("small", waits(50, 100))):
            divider.seen(name, 1000)
            divider.demanded(name, demand, float(tick))
        divider.divide(room, float(tick))
        divider.submitted("both", 100, float(tick))  # it need not wait: its class is higher
    grants = divider.divide(Room(1000, 5, most_tokens=2000), 7.0)
    assert grants["both"].num_tokens >= 700 + 900


def test_requests_of_one_size_that_need_less_than_they_say_are_not_taken_for_one_that_waits_for_long() -> None:
    divider = divider_of("cached", "other")
    for tick in range(100):
        now = tick / 10
        accounts = (AccountDemand("x", num_requests=50, work=50.0, waited_seconds=1.0),)  # another request each time
        divider.seen("cached", 1000)
        divider.demanded("cached", Demand(50 * 900, 50, 900, 1, accounts), now)
        divider.seen("other", 1000)
        divider.demanded("other", waits(50, 100, y=50), now)
        divider.divide(Room(300, 5, most_tokens=2000), now)
        divider.submitted("cached", 100, now)
        divider.submitted("other", 100, now)
    assert divider.divide(Room(600, 5, most_tokens=2000), 10.0)["other"].num_tokens >= 100 * 100 + 300


def test_a_gateway_that_says_nothing_any_more_keeps_no_room_until_it_does() -> None:
    divider, room, seats = divider_of("lost", "here"), Room(1000, 4), {"lost": 0, "here": 0}
    divider.demanded("lost", waits(50), 0.0)
    told = 0
    for tick in range(1, 100):
        now = tick / 10
        divider.demanded("here", waits(50), now)
        grants = divider.divide(room, now)
        told += now > 5.0 and "lost" in grants
        if "here" in grants:
            divider.seen("here", grants["here"].number)
        seats["here"] = divider.of("here", now)[1][1]
        seats["lost"] = divider.of("lost", now)[1][1]
        if now < 2.0:
            assert seats["lost"] > 1
        if now > 5.0:
            assert seats["lost"] <= 1 and seats["here"] >= 3, "it has nothing to use, and one place at most is kept"
    assert not told
    divider.submitted("lost", 50, 10.0)  # it was stopped for a while; its grants have expired
    assert divider.divide(Room(1000, 8), 10.1)["lost"].num_requests > 1


def test_a_refusal_has_a_grant_also_for_a_gateway_that_has_long_needed_none() -> None:
    divider = divider_of("a", "b")
    divider.divide(ROOM, 0.0)
    assert "a" in divider.renewed("a", ROOM, 60.0)
    divider.demanded("b", waits(50), 60.0)
    divider.divide(ROOM, 60.0)
    divider.divide(ROOM, 63.0)
    assert "b" in divider.renewed("b", ROOM, 63.1), "it is alive"


def test_an_idle_worker_takes_a_request_of_any_size() -> None:
    divider = divider_of("a", "b")
    divider.demanded("a", Demand(5000, 16, 5000, 16), 0.0)
    idle = Room(1000, 4, takes_any=True)
    grant = divider.divide(idle, 0.0)["a"]
    assert (grant.num_tokens, grant.num_requests) == (5000, 16)
    divider.seen("a", grant.number)
    divider.demanded("a", Demand(5000, 16, 5000, 16), LATER)
    assert divider.divide(Room(1000, 4), LATER)["a"].num_requests <= 4, "something runs there"


def test_an_idle_worker_takes_first_what_was_passed_by_for_long() -> None:
    divider = divider_of("large", "small")
    divider.demanded("small", waits(50, 200), 0.0)
    divider.demanded("large", waits(1, 900), 0.0)
    for _ in range(30):
        divider.submitted("large", 100, 0.0)
    divider.divide(Room(100, 5), 0.0)
    assert divider.divide(Room(100, 5, takes_any=True), 6.0)["large"].num_tokens == 3000 + 900


def test_nothing_passes_the_first_where_room_is_granted_in_order() -> None:
    divider = divider_of("large", "small")
    divider.demanded("large", waits(1, 900), 0.0)
    divider.demanded("small", waits(50, 100), 0.0)
    assert divider.divide(Room(300, 9, in_order=True), 0.0)["small"].num_tokens == 0
    assert divider.divide(Room(500, 9, in_order=True), 0.0) == {}
    grants = divider.divide(Room(500, 9, takes_any=True, in_order=True), 0.1)
    assert grants["large"].num_tokens == 900, "it takes longer than the window, and is not waited for forever"
    divider.submitted("large", 900, 0.1)
    divider.demanded("large", waits(1, 900), 0.1)
    assert divider.divide(Room(400, 9, in_order=True), 0.1)["small"].num_tokens == 400
    assert divider.outstanding()[0] == 400, "and the small ones go before the next large one"


def test_a_gateway_that_waits_for_something_else_keeps_the_room_from_nobody_for_long() -> None:
    divider = divider_of("picky", "needy")
    room, used = Room(300, 9, in_order=True), {"picky": 0, "needy": 0}
    divider.demanded("picky", waits(50, 100), 0.0)
    divider.demanded("needy", waits(50, 100), 0.0)
    for tick in range(100):
        now = tick * 0.05
        for name, grant in divider.divide(room, now).items():
            divider.seen(name, grant.number)
            num_free = grant.num_tokens - used[name]
            if name == "needy" and num_free >= 100:
                used[name] += num_free
                for _ in range(num_free // 100):
                    divider.submitted(name, 100, now)
    assert used["needy"] >= 5 * 300, "one window of room in a second, or more"


def test_no_wait_however_long_breaks_the_order_where_nothing_passes_what_is_first() -> None:
    """A batch of long prompts had its turn each five seconds, and then the worker for ten."""
    divider, room = divider_of("batches", "others"), Room(500, 9, takes_any=True, in_order=True)

    def told(now: float) -> None:
        long = AccountDemand("a", service_class=0, num_requests=1, waited_seconds=now)
        short = AccountDemand("b", service_class=1, num_requests=20, waited_seconds=now)
        divider.demanded("batches", Demand(10_000, 1, 10_000, 1, (long,)), now)
        divider.demanded("others", Demand(1000, 20, 50, 1, (short,)), now)

    for now in range(8):
        told(float(now))
        grants = divider.divide(room, float(now))
        assert "batches" not in grants or grants["batches"].num_requests == 0


def test_a_gateway_that_says_nothing_any_more_is_not_waited_for_where_room_is_granted_in_order() -> None:
    divider, room = divider_of("stopped", "alive"), Room(500, 9, in_order=True)
    divider.demanded("stopped", waits(1, 400, x=1), 0.0)
    for now in (0.0, 0.5, 1.0, 1.5, 2.0):
        divider.demanded("alive", waits(9, 400, y=9), now)
        divider.divide(room, now)
    assert divider._gateways["stopped"].waits
    divider.demanded("alive", waits(9, 400, y=9), 2.5)
    divider.divide(room, 2.5)
    assert not divider._gateways["stopped"].waits and divider._gateways["alive"].waits
    divider.demanded("stopped", waits(1, 400, x=1), 3.0)
    assert divider._gateways["stopped"].waits


@pytest.mark.parametrize(("num_needed", "charged"), [(0, 0.0), (9, 1.0)])
def test_what_is_left_unused_is_charged_for_as_one_turn_and_only_while_another_lacks_room(
    num_needed: int, charged: float
) -> None:
    divider, room = divider_of("picky", "needy"), Room(500, 40, in_order=True)
    divider.demanded("picky", waits(5, 100, x=5), 0.0)
    divider.divide(room, 0.0)
    divider.demanded("needy", waits(num_needed, 100, y=num_needed) if num_needed else Demand(), 0.1)
    divider.divide(room, 0.1)
    for now in (0.2, 0.3):
        divider.divide(room, now)
    work = divider._order._work_of(AccountDemand("x", num_requests=5))
    assert divider._order._used[0].of("x") == pytest.approx(charged * work)


def test_who_leaves_a_turn_unused_keeps_room_for_one_request_until_it_sends_one() -> None:
    """Each turn that it does not use made the other account's lead smaller by one request, four times a second."""
    divider, room = divider_of("picky", "needy"), Room(1000, 40, in_order=True)
    num_used = 0
    for tenth in range(100):
        now = tenth / 10
        divider.demanded("picky", waits(9, 100, x=9), now)
        divider.demanded("needy", waits(9, 100, y=9), now)
        divider.divide(room, now)
        _, (num_tokens, num_requests) = divider.of("needy", now)
        if num_requests and num_tokens >= 100:
            num = min(num_requests, num_tokens // 100)
            divider.submitted("needy", 100 * num, now, num)
            for _ in range(num):
                divider.let_in("needy", "y", 1.0, now)
            num_used += num if now >= 5.0 else 0
    assert num_used >= 50 * 8, "of ten in each tenth of a second"


def test_gateways_where_nothing_happens_have_no_part_of_a_worker_that_grants_in_order() -> None:
    divider, room = divider_of("a", "b", "c", "d"), Room(1000, 8, in_order=True)
    assert divider.divide(room, 0.0)["a"].num_tokens == 250
    divider.submitted("a", 10, 4.0)
    divider.divide(room, 4.0)
    divider.submitted("a", 10, 8.0)
    assert divider.divide(room, 8.0)["a"].num_tokens - 20 == 1000


def test_who_begins_to_wait_has_no_credit_for_idle_time() -> None:
    divider = divider_of("a", "b")
    divider.demanded("a", waits(50, x=50), 0.0)
    for step in range(100):
        divider.submitted("a", 50, step * 0.01)
        divider.let_in("a", "x", 1.0, step * 0.01)
    divider.demanded("b", waits(50, y=50), 1.0)
    grants = divider.divide(Room(10_000, 20), 1.0)
    assert [grants[name].num_requests for name in "ab"] == [100 + 10, 10]


def test_a_new_worker_takes_a_few_requests_and_twice_as_many_with_each_first_token() -> None:
    start = SlowStart(30)
    assert [start.bound(100, without) for without in (0, 3, 4, 9)] == [4, 1, 0, 0]
    bounds = []
    while not start.is_over:
        start.first_token()
        bounds.append(start.bound(100, 0))
    assert bounds == [8, 16, 100]


class OneWorker(RuleBasedStateMachine):
    """A worker and its gateways, with messages on the way; requests have up to 100 of 1,000 tokens."""

    CAPACITY, PLACES, LARGEST = 1000, 8, 100

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.divider: GrantDivider[int] = GrantDivider()
        self.running: list[int] = []
        self.gateways: dict[int, dict[str, Any]] = {}
        self.num_attached = 0

    @property
    def room(self) -> Room:
        return Room(self.CAPACITY - sum(self.running), self.PLACES - len(self.running), takes_any=not self.running)

    @property
    def most_tokens(self) -> int:
        """That it has and has granted, in all."""
        return self.CAPACITY

    def divide(self) -> None:
        for key, grant in self.divider.divide(self.room, self.now).items():
            last = self.gateways[key]["last"]
            assert grant.number == last + 1
            self.gateways[key]["last"] = grant.number
            self.gateways[key]["down"].append((self.now, grant))

    def deliver_up(self, key: int) -> None:
        _, kind, value = self.gateways[key]["up"].popleft()
        if kind == "submit":
            self.divider.submitted(key, value, self.now)
            self.running.append(value)
            assert sum(self.running) <= self.most_tokens and len(self.running) <= self.PLACES
        else:
            demand, number = value
            self.divider.seen(key, number)
            self.divider.demanded(key, demand, self.now)

    def deliver_down(self, key: int) -> None:
        gateway = self.gateways[key]
        _, grant = gateway["down"].popleft()
        gateway["grant"], gateway["until"] = grant, self.now + grant.valid_seconds
        gateway["up"].append((self.now, "demand", (gateway["demand"], grant.number)))

    @precondition(lambda self: len(self.gateways) < 4)
    @rule()
    def attach(self) -> None:
        self.num_attached += 1
        self.divider.attach(self.num_attached)
        gateway: dict[str, Any] = {"up": deque(), "down": deque(), "grant": None, "until": 0.0, "last": 0}
        self.gateways[self.num_attached] = {**gateway, "demand": Demand(), "tokens": 0, "requests": 0}
        self.divide()

    @precondition(lambda self: self.gateways)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.gateways)))
        del self.gateways[key]
        self.divider.detach(key)
        self.divide()

    @precondition(lambda self: self.gateways)
    @rule(data=st.data(), num=st.integers(0, 6), part=st.integers(1, 100))
    def demand(self, data: st.DataObject, num: int, part: int) -> None:
        size = part * self.LARGEST // 100
        gateway = self.gateways[data.draw(st.sampled_from(sorted(self.gateways)))]
        gateway["demand"] = Demand(num * size, num, size if num else 0)
        number = gateway["grant"].number if gateway["grant"] else 0
        gateway["up"].append((self.now, "demand", (gateway["demand"], number)))

    @precondition(lambda self: self.gateways)
    @rule(data=st.data(), part=st.integers(1, 100))
    def submit(self, data: st.DataObject, part: int) -> None:
        size = part * self.LARGEST // 100
        gateway = self.gateways[data.draw(st.sampled_from(sorted(self.gateways)))]
        grant: Grant | None = gateway["grant"]
        if grant is None or self.now >= gateway["until"]:
            return
        if gateway["tokens"] + size <= grant.num_tokens and gateway["requests"] < grant.num_requests:
            gateway["tokens"] += size
            gateway["requests"] += 1
            gateway["up"].append((self.now, "submit", size))

    @precondition(lambda self: self.gateways)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.gateways)))
        if self.gateways[key]["up"]:
            self.deliver_up(key)
            self.divide()
        elif self.gateways[key]["down"]:
            self.deliver_down(key)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.divide()

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.2]), times=st.integers(1, 12))
    def wait(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.now += seconds
            for key, gateway in self.gateways.items():  # no message is on its way for longer than 0.2 s
                while gateway["down"] and self.now - gateway["down"][0][0] >= 0.2:
                    self.deliver_down(key)
                while gateway["up"] and self.now - gateway["up"][0][0] >= 0.2:
                    self.deliver_up(key)
            self.divide()

    @invariant()
    def no_more_is_granted_than_there_is(self) -> None:
        num_tokens, num_requests = self.divider.outstanding()
        assert num_tokens <= self.most_tokens - sum(self.running)
        assert num_requests <= self.room.num_requests


class OnePrefillWorker(OneWorker):
    """Its room is a window of work, requests are up to twice as large, and it has a part of one when that ends."""

    CAPACITY, PLACES, LARGEST = 300, 8, 600

    @property
    def room(self) -> Room:
        num_left = sum(self.running)
        num_places, takes_any = self.PLACES - len(self.running), 2 * num_left <= self.CAPACITY
        return Room(
            max(0, self.CAPACITY - num_left), num_places, most_tokens=10_000, takes_any=takes_any, in_order=True
        )

    @property
    def most_tokens(self) -> int:
        return self.CAPACITY // 2 + self.LARGEST

    @precondition(lambda self: self.running)
    @rule(num=st.integers(1, 200))
    def compute(self, num: int) -> None:
        self.running[0] -= min(num, self.running[0])
        if not self.running[0]:
            self.running.pop(0)
        self.divide()


OneWorker.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestOneWorker = OneWorker.TestCase
OnePrefillWorker.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestOnePrefillWorker = OnePrefillWorker.TestCase


@pytest.mark.parametrize("num_gateways", [1, 2, 5])
def test_each_gateway_has_a_request_while_there_are_as_many_places(num_gateways: int) -> None:
    divider = divider_of(*map(str, range(num_gateways)))
    divider.demanded("0", waits(1000), 0.0)
    grants = divider.divide(Room(100_000, num_gateways), 0.0)
    assert [grant.num_requests for grant in grants.values()] == [1] * num_gateways
