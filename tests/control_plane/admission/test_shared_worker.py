"""Several gateways share one worker as one gateway would: by accounts, without a refusal, and all of it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import astuple, dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

import pytest

from control_plane.admission.attachment import Attachment
from control_plane.admission.attachment import Grant as Granted
from control_plane.admission.budgets import Budget
from control_plane.admission.elsewhere import AccountTurn, LetIn
from control_plane.admission.model_admission import Bounds, ModelAdmission, Waiter
from tandem_worker.account_order import AccountDemand
from tandem_worker.grants import Demand, Grant, GrantDivider, Room

PLACES, POOL_TOKENS = 9, 4096
PROMPT_TOKENS, ANSWER_TOKENS = 100, 200
NO_BUDGET = Budget(None, None)
SECONDS = 1.0
"""Of a request at the worker."""
MESSAGE_SECONDS = 0.002
REPORT_SECONDS = 0.05
MAX_WAITING = 20
"""Of one account at one gateway, without a budget."""


@dataclass(eq=False)
class Gateway:
    """Admission of one gateway, with its part of the protocol."""

    name: int
    admission: ModelAdmission = field(default_factory=lambda: ModelAdmission(Bounds(1000, 1000)))
    attachment: Attachment = field(default_factory=Attachment)
    has_reported: bool = False
    num_let_in: Counter[str] = field(default_factory=Counter)
    num_refused: Counter[str] = field(default_factory=Counter)

    def demand(self, at: float) -> Demand:
        now = self.admission.demand()
        accounts = tuple(
            AccountDemand(e.account, e.service_class, e.num_requests, e.work, at - e.since) for e in now.accounts
        )
        return Demand(now.num_tokens, now.num_requests, now.first_tokens, now.first_requests, accounts)


class Fleet:
    """One worker and its gateways on virtual time."""

    def __init__(self, num_gateways: int, budget: Budget = NO_BUDGET) -> None:
        self.now = 0.0
        self.budget = budget
        self.divider: GrantDivider[int] = GrantDivider()
        self.gateways = [Gateway(name) for name in range(num_gateways)]
        self.running: Counter[int] = Counter()
        self.used: Counter[str] = Counter()
        """Device tokens, by account."""
        self.busy_seconds = 0.0
        self._events: list[tuple[float, int, Any]] = []
        self._numbers = count()
        for gateway in self.gateways:
            self.divider.attach(gateway.name)
        self.renew()

    def at(self, seconds: float, action: Any) -> None:
        heappush(self._events, (self.now + seconds, next(self._numbers), action))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            at, _, action = heappop(self._events)
            self.busy_seconds += (at - self.now) * self.running.total()
            self.now = at
            action()
        self.now = until

    def room(self) -> Room:
        num = self.running.total()
        return Room(POOL_TOKENS - num * (PROMPT_TOKENS + ANSWER_TOKENS), PLACES - num, takes_any=not num)

    def divide(self) -> None:
        for name, grant in self.divider.divide(self.room(), self.now).items():
            self.at(MESSAGE_SECONDS, lambda name=name, grant=grant: self._granted(self.gateways[name], grant))

    def renew(self) -> None:
        self.divide()
        self.at(1.0, self.renew)

    def _granted(self, gateway: Gateway, grant: Grant) -> None:
        if gateway.name not in self.divider:
            return
        turns = [AccountTurn(*astuple(each)) for each in grant.turns]
        gateway.admission.granted("w", turns, LetIn(grant.work_elsewhere, grant.num_elsewhere), self.now)
        if gateway.attachment.granted(Granted(grant.number, grant.num_tokens, grant.num_requests, 2.0), self.now):
            self._report(gateway, grant.number)
        self.let_in(gateway)

    def arrive(self, gateway: Gateway, account: str) -> None:
        waiter = Waiter("m", account, num_tokens=PROMPT_TOKENS, cost_ms=1000.0)
        predicted = gateway.admission.too_late_seconds(waiter, self.budget, 60.0, self.now)
        num_waiting = sum(waiter.account == account for waiter in gateway.admission)
        is_full = self.budget.wait_seconds is None and num_waiting >= MAX_WAITING
        if is_full or predicted is not None:
            gateway.num_refused[account] += 1
            return
        gateway.admission.enter(waiter, self.now)
        self.let_in(gateway)
        if len(gateway.admission) and not gateway.has_reported:
            self.report(gateway)

    def report(self, gateway: Gateway) -> None:
        """Tell the worker what waits, now and then until nothing does."""
        if gateway.name not in self.divider:
            return
        gateway.has_reported = bool(len(gateway.admission))
        self._report(gateway, 0)
        if gateway.has_reported:
            self.at(REPORT_SECONDS, lambda: self.report(gateway))

    def _report(self, gateway: Gateway, number: int) -> None:
        demand = gateway.demand(self.now)
        self.at(MESSAGE_SECONDS, lambda: self._demanded(gateway, demand, number))

    def _demanded(self, gateway: Gateway, demand: Demand, number: int) -> None:
        if gateway.name in self.divider:
            self.divider.seen(gateway.name, number)
            self.divider.demanded(gateway.name, demand, self.now)
            self.divide()

    def let_in(self, gateway: Gateway) -> None:
        while (waiter := gateway.admission.first()) is not None:
            if not gateway.attachment.has_room(waiter.num_tokens, 1, self.now):
                return
            gateway.attachment.sent(waiter.num_tokens, self.now)
            gateway.admission.leave(waiter, self.now)
            gateway.admission.let_in(waiter, 1000.0, self.now)
            gateway.num_let_in[waiter.account] += 1
            self.at(MESSAGE_SECONDS, lambda waiter=waiter: self._submitted(gateway, waiter))

    def _submitted(self, gateway: Gateway, waiter: Waiter) -> None:
        if gateway.name not in self.divider:
            return
        self.divider.submitted(gateway.name, waiter.num_tokens, self.now)
        self.divider.let_in(gateway.name, waiter.account, waiter.work, self.now)
        self.running[gateway.name] += 1
        assert self.running.total() <= PLACES, "it would have been refused"
        self.used[waiter.account] += PROMPT_TOKENS + ANSWER_TOKENS
        self.at(SECONDS, lambda: self._ended(gateway))

    def _ended(self, gateway: Gateway) -> None:
        if gateway.name in self.divider:
            self.running[gateway.name] -= 1
            self.divide()

    def kill(self, gateway: Gateway) -> None:
        self.divider.detach(gateway.name)
        del self.running[gateway.name]
        self.divide()

    def load_at_random(self, seconds: float, rates: dict[tuple[int, str], float], seed: int) -> None:
        """Let as many requests come at random."""
        rng = random.Random(seed)
        for (name, account), rate in rates.items():
            at, gateway = rng.expovariate(rate), self.gateways[name % len(self.gateways)]
            while at < seconds:
                self.at(at, lambda g=gateway, a=account: self.arrive(g, a))
                at += rng.expovariate(rate)

    def load(self, seconds: float, rates: dict[tuple[int, str], float]) -> None:
        """Let requests come, evenly: so many a second by gateway and account."""
        for (name, account), rate in rates.items():
            gateway = self.gateways[name % len(self.gateways)]
            for number in range(int(seconds * rate)):
                self.at((number + 0.5) / rate, lambda g=gateway, a=account: self.arrive(g, a))


UNEVEN = {(0, "greedy"): 15.0, (1, "greedy"): 8.0, (1, "small"): 4.5, (0, "mean"): 6.0, (2, "greedy"): 1.0}


def shares(fleet: Fleet) -> dict[str, float]:
    return {account: used / fleet.used.total() for account, used in sorted(fleet.used.items())}


def loaded(num_gateways: int, seconds: float = 60.0) -> Fleet:
    fleet = Fleet(num_gateways)
    fleet.load(seconds, UNEVEN)
    fleet.run(seconds)
    return fleet


@pytest.mark.parametrize("num_gateways", [2, 4])
def test_goodput_and_shares_of_several_gateways_are_those_of_one(num_gateways: int) -> None:
    """Three accounts, one at several gateways, ask for four times what the worker can do."""
    one, several = loaded(1), loaded(num_gateways)
    assert several.used.total() == pytest.approx(one.used.total(), rel=0.05)
    assert shares(several) == pytest.approx(shares(one), abs=0.05)
    assert several.busy_seconds >= 0.98 * PLACES * 60


def test_an_account_that_asks_little_at_each_of_four_gateways_gets_what_one_gateway_would_give() -> None:
    """What it asks at each varies with every request. Three times what the worker can do, within ten seconds."""

    def parts_of(num_gateways: int) -> dict[str, float]:
        used: Counter[str] = Counter()
        for seed in range(4):
            fleet = Fleet(num_gateways, Budget(10.0, None))
            spread = {(name, "other"): 0.9 for name in range(4)} | {(name, "greedy"): 5.0 for name in range(4)}
            fleet.load_at_random(100.0, {**spread, (0, "small"): 3.0}, seed)
            fleet.run(100.0)
            used.update(fleet.used)
        return {account: num / used.total() for account, num in sorted(used.items())}

    assert parts_of(4) == pytest.approx(parts_of(1), rel=0.05)


def test_a_gateway_that_is_killed_leaves_all_to_the_other() -> None:
    fleet = Fleet(2)
    fleet.load(30.0, {(0, "a"): 20.0, (1, "b"): 20.0})
    fleet.run(10.0)
    assert shares(fleet) == pytest.approx({"a": 0.5, "b": 0.5}, abs=0.05)
    fleet.kill(fleet.gateways[0])
    fleet.run(10.1)
    before, busy = fleet.used["b"], fleet.busy_seconds
    fleet.run(20.1)
    assert fleet.used["b"] - before == pytest.approx(10 * PLACES * (PROMPT_TOKENS + ANSWER_TOKENS), rel=0.05)
    assert fleet.busy_seconds - busy == pytest.approx(10 * PLACES, rel=0.02)


def test_a_burst_at_one_gateway_has_the_room_that_the_idle_other_kept_and_the_other_is_next() -> None:
    fleet = Fleet(2)
    fleet.run(0.5)
    for _ in range(20):
        fleet.arrive(fleet.gateways[0], "a")
    fleet.run(0.6)
    assert fleet.running[0] == PLACES
    fleet.arrive(fleet.gateways[1], "b")
    fleet.run(0.6 + SECONDS)
    assert fleet.running[1] == 1, "before the eleven that wait at the first one"


def test_a_gateway_that_has_had_less_gets_as_much_again_although_it_lets_less_wait() -> None:
    """One account asks at both, at first hardly at the second, then alike, within a budget of ten seconds.

    What waits follows what is served: as a measure of what each should get, it would keep any division as it is.
    """
    fleet = Fleet(2, Budget(10.0, None))
    fleet.load(40.0, {(0, "greedy"): 18.0, (1, "greedy"): 2.0})
    fleet.run(40.0)
    fleet.load(80.0, {(0, "greedy"): 10.0, (1, "greedy"): 10.0})
    fleet.run(70.0)
    before = [gateway.num_let_in["greedy"] for gateway in fleet.gateways]
    fleet.run(120.0)
    first, second = (gateway.num_let_in["greedy"] - num for gateway, num in zip(fleet.gateways, before, strict=True))
    assert first + second == pytest.approx(50 * PLACES, rel=0.02)
    assert second / first == pytest.approx(1.0, abs=0.1)
