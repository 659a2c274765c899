"""The order of all that waits for one worker, at whichever gateways: as if it waited in one queue.

The next turn is that of the highest class that waits, there of the account that has used least of the worker, and of
that account's requests the one that has waited longest. So several gateways serve accounts as one would.

No clock, no loop, no message: `now` is in monotonic seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush, heapreplace
from typing import Generic, TypeVar

from tandem_runtime.demands import Demands
from tandem_runtime.virtual_counters import VirtualCounters

_MAX_KEPT = 4096
"""Accounts whose use is remembered while they do not wait."""
_LEAST_SECONDS = 0.001
"""In which requests are taken to have come: of those that came at once at two gateways, both have their turns."""
_MAX_ASKERS = 64
"""Classes and accounts whose rates are measured: those that have sent something last."""
_MAX_TOLD = 64
"""Accounts and classes that a gateway hears of: those that are next."""

REST_CLASS = -1000
"""Of requests whose account a gateway does not tell: those that it tells are next there."""

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class AccountDemand:
    """Requests of one account and class that wait at one gateway. Work is in tokens of an answer."""

    account: str
    service_class: int = 0
    num_requests: int = 1
    work: float = 0.0
    """Predicted, of those requests; 0.0: not known."""
    waited_seconds: float = 0.0
    """By the first of them, when the gateway told."""


@dataclass(frozen=True)
class AccountTurn:
    """What a gateway hears of an account and class that waits anywhere, or whose requests have come lately."""

    account: str
    service_class: int
    lead: float
    """Work that the account has used beyond the one that has used least, of those of the class that wait."""
    num_elsewhere: int
    work_elsewhere: float
    """Of requests that wait at other gateways."""
    work_per_second_elsewhere: float
    """That other gateways have sent the worker lately."""


@dataclass(eq=False)
class _Waiting:
    demand: AccountDemand
    since: float
    """When the first of the requests began to wait."""


class AccountOrder(Generic[_Key]):
    """Of one worker."""

    def __init__(self) -> None:
        self._used: defaultdict[int, VirtualCounters] = defaultdict(partial(VirtualCounters, _MAX_KEPT))
        """By class."""
        self._waiting: dict[_Key, list[_Waiting]] = {}
        self._sent = Demands(_MAX_ASKERS)
        self._sent_by: dict[_Key, Demands] = {}
        """Work that has come lately, by class and account; that of each gateway."""
        self._mean_work = 1.0
        """Of a request that was charged."""

    def demanded(self, key: _Key, demands: Sequence[AccountDemand], now: float) -> None:
        """Take in all that waits at a gateway, in place of what it has told before."""
        before = self._waiting.pop(key, [])
        if demands:
            self._waiting[key] = [_Waiting(each, now - each.waited_seconds) for each in demands]
        for each in demands:
            self._used[each.service_class].arrive(each.account)
        for gone in before:
            self._used[gone.demand.service_class].leave(gone.demand.account)

    def charge(self, account: str, work: float, service_class: int = 0) -> None:
        """An account uses the worker; a negative amount takes a charge back."""
        self._used[service_class].charge(account, work)

    def forget(self, key: _Key) -> None:
        """A gateway has left."""
        self.demanded(key, (), 0.0)
        self._sent_by.pop(key, None)

    def let_in(self, key: _Key, account: str, work: float, now: float, service_class: int = 0) -> None:
        """A gateway's request has come: charge its account for the prompt and the predicted answer."""
        self._sent.asked((service_class, account), work, now)
        own = self._sent_by.setdefault(key, Demands(_MAX_ASKERS, self._sent.began_at))
        own.asked((service_class, account), work, now)
        used = self._used[service_class]
        used.arrive(account)  # it may not have waited: idle time is no credit
        used.leave(account)
        used.let_in(account)
        used.charge(account, work)
        self._mean_work += 0.1 * (work - self._mean_work)

    def passes(self, key: _Key, num_requests: int, now: float) -> None:
        """A gateway has had its turn, for so many requests, and has not used it: it is behind the others."""
        first = min(self._waiting.get(key, ()), key=self._rank, default=None)
        if first is not None:
            first.since = now
            used = self._used[first.demand.service_class]
            used.charge(first.demand.account, num_requests * self._work_of(first.demand))

    def turns(self, now: float) -> Turns[_Key]:
        """Return who is next, and who is after that, as if each of them were served in its turn."""
        turns: Turns[_Key] = Turns()
        for number, (key, waiting) in enumerate(self._waiting.items()):
            for each in waiting:
                num, work = each.demand.num_requests, self._work_of(each.demand)
                place = _Place(each.since, number, key, num, max(_LEAST_SECONDS, now - each.since) / num, work)
                turns.add(each.demand, self._used[each.demand.service_class].of(each.demand.account), place)
        return turns

    def told(self, key: _Key, now: float) -> list[AccountTurn]:
        """Return what a gateway hears of all that waits; nothing where no other gateway waits."""
        if not any(other != key for other in self._waiting):
            return []
        found: dict[tuple[int, str], _Told] = defaultdict(_Told)
        for other, waiting in self._waiting.items():
            for demand in (each.demand for each in waiting):
                told = found[demand.service_class, demand.account]
                if other != key:
                    told.num += demand.num_requests
                    told.work += demand.work
        own = dict(self._sent_by[key].rates(now)) if key in self._sent_by else {}
        for asker, per_second in self._sent.rates(now):
            found[asker].work_per_second = max(0.0, per_second - own.get(asker, 0.0))
        ranked = sorted(found, key=lambda each: (-each[0], self._used[each[0]].of(each[1])))[:_MAX_TOLD]
        return [
            AccountTurn(
                account,
                service_class,
                max(0.0, self._used[service_class].of(account) - self._used[service_class].least_ms),
                found[service_class, account].num,
                found[service_class, account].work,
                found[service_class, account].work_per_second,
            )
            for service_class, account in ranked
        ]

    def _rank(self, waiting: _Waiting) -> tuple[int, float, float]:
        demand = waiting.demand
        return -demand.service_class, self._used[demand.service_class].of(demand.account), waiting.since

    def _work_of(self, demand: AccountDemand) -> float:
        """Return the work of one of the requests, on average."""
        return demand.work / max(1, demand.num_requests) or self._mean_work


@dataclass
class _Told:
    """Of other gateways."""

    num: int = 0
    work: float = 0.0
    work_per_second: float = 0.0


@dataclass(eq=False)
class _Place(Generic[_Key]):
    """Requests of one account at one gateway."""

    since: float
    number: int
    key: _Key
    num_left: int
    gap: float
    """Between two of the requests, on average."""
    work: float
    """Of one of them."""

    def __lt__(self, other: _Place[_Key]) -> bool:
        return (self.since, self.number) < (other.since, other.number)


class Turns(Generic[_Key]):
    """What is next, as of one moment."""

    def __init__(self) -> None:
        self._used: dict[tuple[int, str], float] = {}
        self._lines: dict[tuple[int, str], list[_Place[_Key]]] = defaultdict(list)
        self._heads: list[tuple[int, float, str]] = []
        self._passed: set[_Key] = set()

    def add(self, demand: AccountDemand, used: float, place: _Place[_Key]) -> None:
        below, account = -demand.service_class, demand.account
        self._used[below, account] = used
        line = self._lines[below, account]
        if not line:
            heappush(self._heads, (below, used, account))
        heappush(line, place)

    def next(self) -> _Key | None:
        """Return the gateway whose turn it is; None: nothing waits."""
        while self._heads:
            below, used, account = self._heads[0]
            line = self._lines[below, account]
            while line and (line[0].key in self._passed or line[0].num_left <= 0):
                heappop(line)
            if not line:
                heappop(self._heads)
            elif used < self._used[below, account]:
                heapreplace(self._heads, (below, self._used[below, account], account))
            else:
                return line[0].key
        return None

    def took(self, num_requests: int) -> None:
        """The gateway that is next gets room for so many requests."""
        below, _, account = self._heads[0]
        line = self._lines[below, account]
        place = heappop(line)
        place.num_left -= num_requests
        place.since += num_requests * place.gap
        self._used[below, account] += num_requests * place.work
        heappush(line, place)

    def skip(self, key: _Key) -> None:
        """A gateway gets nothing more."""
        self._passed.add(key)
