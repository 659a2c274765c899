"""Keeps the requests that wait for one model, and decides which is next, how many may wait, and how long they wait.

Order: requests whose worker was lost first, then by class, then the account with the least virtual counter, then by
arrival. A waiter that finds no room goes back to its place.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from control_plane.admission.cached_shares import CachedShares
from control_plane.admission.prices import Prices
from control_plane.admission.service_classes import ServiceClass
from control_plane.admission.virtual_counters import VirtualCounters
from control_plane.admission.waiting_demand import WaitingDemand

_HALF_LIFE_SECONDS = 10.0
"""The rate at which waiting requests are let in forgets a half in so long a time in which any waited."""
_MIN_LET_IN, _MIN_SECONDS = 4, 0.5
"""Before the rate is known."""


@dataclass(eq=False)
class Waiter:
    """One request on its way in. It has its place among the waiting from the first time it waits."""

    model_id: str
    account: str
    service_class: int = ServiceClass.DEFAULT
    num_tokens: int = 0
    """Of the prompt: what a worker must have free."""
    cost_ms: float = 1.0
    """Predicted device time of prompt and answer."""
    is_moving: bool = False
    """Its worker was lost: it is before all others, and beyond the bounds."""
    num_choices: int = 1
    """Answers that it asks for: a worker that is handed the prompt needs room for each."""
    order: int | None = None
    """Its arrival; None: it has not waited yet."""
    came_at: float = 0.0
    """When it first waited."""
    tried_at: float = 0.0
    """When it last looked for room."""


@dataclass(frozen=True)
class Bounds:
    """Requests that may wait for one model."""

    max_waiting: int
    max_per_account: int

    @property
    def max_batch(self) -> int:
        """Of the batch class: the other half of the places is for requests that go before them."""
        return max(1, self.max_waiting // 2)


Bound = Literal["max_waiting", "max_waiting_per_account", "batch"]


class Full(Exception):
    """A request may not wait: too many do. `setting` names the bound."""

    def __init__(self, setting: Bound, num_waiting: int, limit: int) -> None:
        super().__init__(setting, num_waiting, limit)
        self.setting: Bound = setting
        self.num_waiting = num_waiting
        self.limit = limit


@dataclass(frozen=True)
class AnswerMeter:
    """Charges an account for the tokens of one request's answers."""

    _counters: VirtualCounters
    _account: str
    _ms_per_token: float

    def answered(self, num_tokens: int) -> None:
        self._counters.charge(self._account, num_tokens * self._ms_per_token)


class _Line:
    """The waiters of one class, by account and arrival."""

    def __init__(self) -> None:
        self.by_account: dict[str, list[Waiter]] = {}

    def add(self, waiter: Waiter) -> None:
        insort(self.by_account.setdefault(waiter.account, []), waiter, key=_order)

    def remove(self, waiter: Waiter) -> None:
        own = self.by_account[waiter.account]
        own.remove(waiter)
        if not own:
            del self.by_account[waiter.account]

    def first(self, counters: VirtualCounters) -> Waiter | None:
        heads = (own[0] for own in self.by_account.values())
        return min(heads, key=lambda waiter: (counters.of(waiter.account), _order(waiter)), default=None)

    def __iter__(self) -> Iterator[Waiter]:
        return (waiter for own in self.by_account.values() for waiter in own)


class ModelAdmission:
    """The waiting requests of one model; `now` is in monotonic seconds."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.counters = VirtualCounters()
        self.prices = Prices()
        self.cached = CachedShares()
        self._moving: list[Waiter] = []
        self._lines: dict[int, _Line] = {}
        self._num_by_account: Counter[str] = Counter()
        self._num_by_class: Counter[int] = Counter()
        self._looking: set[Waiter] = set()
        """Their turn has come, and they look for room: a worker may refuse, so they keep their places until they go."""
        self._num_arrived = 0
        self._rate = _Rate()

    def __len__(self) -> int:
        return self._num_by_class.total()

    @property
    def num_by_class(self) -> dict[int, int]:
        """Return how many wait, by class; classes that nobody waits in may be left out."""
        return dict(self._num_by_class)

    def must_wait(self, waiter: Waiter) -> bool:
        """Whether a request that comes now is behind one that waits: of its class or a higher one, or moving."""
        if waiter.is_moving:
            return False
        return bool(self._moving) or any(service_class >= waiter.service_class for service_class in self._lines)

    def enter(self, waiter: Waiter, now: float, *, has_accounts: bool = True) -> None:
        """Let a request wait, at its place if it has waited before. Raise Full.

        `has_accounts`: accounts are told apart; else any caller takes any account's name.
        """
        if waiter.order is None:
            if not waiter.is_moving:
                self.check_bounds(waiter, has_accounts=has_accounts)
            self._num_arrived += 1
            waiter.order, waiter.came_at = self._num_arrived, now
        self._looking.discard(waiter)
        waiter.tried_at = now
        if not len(self):
            self._rate.waits(now)
        self.counters.arrive(waiter.account)
        if waiter.is_moving:
            insort(self._moving, waiter, key=_order)
        else:
            self._lines.setdefault(waiter.service_class, _Line()).add(waiter)
        self._num_by_account[waiter.account] += 1
        self._num_by_class[waiter.service_class] += 1

    def look(self, waiter: Waiter, now: float) -> None:
        """It is the turn of a request that waits. It has its place until `enter`, or `gone`."""
        self.leave(waiter, now)
        if not waiter.is_moving:  # it has no place: it is beyond the bounds
            self._looking.add(waiter)

    def gone(self, waiter: Waiter) -> None:
        """A request has started, or failed: its place is free."""
        self._looking.discard(waiter)

    def leave(self, waiter: Waiter, now: float) -> None:
        """A request that waits does so no more."""
        if waiter.is_moving:
            self._moving.remove(waiter)
        else:
            line = self._lines[waiter.service_class]
            line.remove(waiter)
            if not line.by_account:
                del self._lines[waiter.service_class]
        self.counters.leave(waiter.account)
        self._num_by_account[waiter.account] -= 1
        if not self._num_by_account[waiter.account]:
            del self._num_by_account[waiter.account]
        self._num_by_class[waiter.service_class] -= 1
        if not len(self):
            self._rate.nobody_waits(now)

    def first(self) -> Waiter | None:
        """Return the request that is next; None: nobody waits."""
        if self._moving:
            return self._moving[0]
        return self._lines[max(self._lines)].first(self.counters) if self._lines else None

    def demand(self) -> WaitingDemand:
        """Return what waits, for the workers."""
        return WaitingDemand.of(self, self.first())

    def let_in(self, waiter: Waiter, device_ms: float, now: float) -> None:
        """A request was sent to a worker, whose device its prompt takes for `device_ms`."""
        if waiter.order is not None:
            self._rate.let_in(waiter.cost_ms, now)
        self.counters.let_in(waiter.account)
        self.counters.charge(waiter.account, device_ms)

    def take_back(self, waiter: Waiter, device_ms: float) -> None:
        """The workers have not taken a request that was let in."""
        self.counters.charge(waiter.account, -device_ms)
        if waiter.order is not None:
            self._rate.take_back(waiter.cost_ms)

    def started(
        self, waiter: Waiter, num_computed_tokens: int, device_ms: float, ms_per_answer_token: float
    ) -> AnswerMeter:
        """The workers have taken a request; the prices learn from its route. Return what charges for its answers."""
        self.prices.routed(num_computed_tokens, device_ms, ms_per_answer_token)
        return AnswerMeter(self.counters, waiter.account, ms_per_answer_token)

    def pass_by(self, waiter: Waiter) -> None:
        """A request need not wait: its account rejoins all the same."""
        self.counters.arrive(waiter.account)
        self.counters.leave(waiter.account)

    def predicted_wait_seconds(self, newcomer: Waiter, now: float) -> float | None:
        """Predict how long a request would wait that comes now, or waits; None: nothing was let in lately.

        Of n accounts that wait each gets an n-th of what is let in, if the others use their parts.
        """
        rate = self._rate.ms_per_second(now)
        if not rate:
            return None
        ahead_ms, own_ms, accounts = newcomer.cost_ms, newcomer.cost_ms, {newcomer.account}
        for waiter in self:
            if waiter is newcomer or (waiter.service_class < newcomer.service_class and not waiter.is_moving):
                continue
            ahead_ms += waiter.cost_ms
            accounts.add(waiter.account)
            if waiter.account == newcomer.account:
                own_ms += waiter.cost_ms
        return min(ahead_ms, own_ms * len(accounts)) / rate

    def __iter__(self) -> Iterator[Waiter]:
        yield from self._moving
        for line in self._lines.values():
            yield from line

    def check_bounds(self, waiter: Waiter, *, has_accounts: bool = True) -> None:
        """Raise Full if a request that comes now may not wait."""
        num_waiting = len(self) + len(self._looking)
        num_own = self._num_by_account[waiter.account]
        num_own += sum(each.account == waiter.account for each in self._looking)
        if num_waiting >= self._bounds.max_waiting:
            raise Full("max_waiting", num_waiting, self._bounds.max_waiting)
        if has_accounts and num_own >= self._bounds.max_per_account:
            raise Full("max_waiting_per_account", num_own, self._bounds.max_per_account)
        num_batch = self._num_by_class[ServiceClass.BATCH]
        if waiter.service_class == ServiceClass.BATCH and num_batch >= self._bounds.max_batch:
            raise Full("batch", num_batch, self._bounds.max_batch)


@dataclass
class _Rate:
    """How much predicted device time of waiting requests is let in per second while any waits.

    Times without a waiting request do not count: then the rate is that of arrivals, and tells nothing.
    """

    _busy_since: float | None = None
    _seconds: float = 0.0
    """While any waited; both sums forget what is long ago."""
    _let_in_ms: float = 0.0
    _num_let_in: int = 0

    def waits(self, now: float) -> None:
        """At least one request waits from now on."""
        self._advance(now)
        self._busy_since = now

    def nobody_waits(self, now: float) -> None:
        self._advance(now)
        self._busy_since = None

    def let_in(self, cost_ms: float, now: float) -> None:
        self._advance(now)
        self._let_in_ms += cost_ms
        self._num_let_in += 1

    def take_back(self, cost_ms: float) -> None:
        self._let_in_ms = max(0.0, self._let_in_ms - cost_ms)
        self._num_let_in -= 1

    def ms_per_second(self, now: float) -> float:
        """Return the rate; 0.0 while too little is known."""
        self._advance(now)
        if self._num_let_in < _MIN_LET_IN or self._seconds < _MIN_SECONDS:
            return 0.0
        return self._let_in_ms / self._seconds

    def _advance(self, now: float) -> None:
        if self._busy_since is None:
            return
        seconds = max(0.0, now - self._busy_since)
        kept = 0.5 ** (seconds / _HALF_LIFE_SECONDS)
        self._seconds = self._seconds * kept + seconds
        self._let_in_ms *= kept
        self._busy_since = now


def _order(waiter: Waiter) -> int:
    assert waiter.order is not None, "a waiting request has its place"
    return waiter.order
