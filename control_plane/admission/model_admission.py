"""Keeps the requests that wait for one model, and decides which is next, how many may wait, and how long they wait.

Order: requests whose worker was lost first, then by class, then the account with the least virtual counter, then by
arrival. A waiter that finds no room goes back to its place.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from control_plane.admission.budgets import Budget
from control_plane.admission.cached_shares import CachedShares
from control_plane.admission.demands import Demands
from control_plane.admission.prices import Prices
from control_plane.admission.service_classes import ServiceClass
from control_plane.admission.virtual_counters import VirtualCounters
from control_plane.admission.waiting_demand import WaitingDemand

_HALF_LIFE_SECONDS = 10.0
"""The rate at which waiting requests are let in forgets a half in so long a time in which any waited."""
_NUM_ROUNDS = 4
SURE = 0.6
"""A request may wait if its predicted wait is at most that part of what it may be: predictions are off by a fifth or
more, and who waits in vain is refused late."""
_LAST = 0.9
"""Who has not had its turn by then gets none: the prompt takes time, too."""
_LULL = 4.0
"""Until the rate is measured, so much more is let wait: before, workers computed fewer requests at once, each at a
higher price, and a burst of requests ends that much sooner than their prices tell."""
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
    num_answer_tokens: float = 0.0
    """Predicted."""
    charged_ms: float = 0.0
    """What its account was charged as it was let in."""
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


@dataclass
class AnswerMeter:
    """Charges an account for the tokens of one request's answers, beyond those that it was charged for in advance."""

    _counters: VirtualCounters
    _account: str
    _prices: Prices
    _num_in_advance: float = 0.0

    def answered(self, num_tokens: float) -> None:
        num_paid = min(self._num_in_advance, num_tokens)
        self._num_in_advance -= num_paid
        self._charge(num_tokens - num_paid)

    def ended(self) -> None:
        """Give back what the answers were shorter than predicted; idempotent."""
        self._charge(-self._num_in_advance)
        self._num_in_advance = 0.0

    def _charge(self, num_tokens: float) -> None:
        if num_tokens:
            self._counters.charge(self._account, num_tokens * self._prices.ms_per_answer_token)


class _Line:
    """The waiters of one class, by account and arrival."""

    def __init__(self) -> None:
        self.by_account: dict[str, list[Waiter]] = {}
        self.cost_ms: dict[str, float] = {}
        """Of each account's waiters together."""

    def add(self, waiter: Waiter) -> None:
        insort(self.by_account.setdefault(waiter.account, []), waiter, key=_order)
        self.cost_ms[waiter.account] = self.cost_ms.get(waiter.account, 0.0) + waiter.cost_ms

    def remove(self, waiter: Waiter) -> None:
        own = self.by_account[waiter.account]
        own.remove(waiter)
        self.cost_ms[waiter.account] -= waiter.cost_ms
        if not own:
            del self.by_account[waiter.account], self.cost_ms[waiter.account]

    def before(self, waiter: Waiter) -> float:
        """Return the cost of what its account has waiting before a request, which may be one of them."""
        if waiter.order is None:
            return self.cost_ms.get(waiter.account, 0.0)
        return sum(each.cost_ms for each in self.by_account.get(waiter.account, ()) if _order(each) < waiter.order)

    def scale(self, factor: float) -> None:
        """The unit of costs has changed."""
        for waiter in self:
            waiter.cost_ms *= factor
        for account in self.cost_ms:
            self.cost_ms[account] *= factor

    def first(self, counters: VirtualCounters) -> Waiter | None:
        heads = (own[0] for own in self.by_account.values())
        return min(heads, key=lambda waiter: (counters.of(waiter.account), _order(waiter)), default=None)

    def __iter__(self) -> Iterator[Waiter]:
        return (waiter for own in self.by_account.values() for waiter in own)


_NOBODY = _Line()


class ModelAdmission:
    """The waiting requests of one model; `now` is in monotonic seconds."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.counters = VirtualCounters()
        self.prices = Prices()
        self._demands = Demands()
        self.cached = CachedShares()
        self._moving: list[Waiter] = []
        self._lines: dict[int, _Line] = {}
        self._num_by_account: Counter[str] = Counter()
        self._num_by_class: Counter[int] = Counter()
        self._looking: set[Waiter] = set()
        """Their turn has come, and they look for room: a worker may refuse, so they keep their places until they go."""
        self._num_arrived = 0
        self._workers: set[str] = set()
        """That have reported, and are still there."""
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
                self._demands.asked((waiter.service_class, waiter.account), waiter.cost_ms, now)
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
        """A request was sent to a worker, whose device its prompt takes for `device_ms`.

        Its account is charged for the answer in advance, as long as predicted: else it would have every turn until
        tokens come, and nobody could say when another's turn is.
        """
        if waiter.order is not None:
            self._rate.let_in(waiter.cost_ms, now)
        self.counters.let_in(waiter.account)
        waiter.charged_ms = device_ms + waiter.num_answer_tokens * self.prices.ms_per_answer_token
        self.counters.charge(waiter.account, waiter.charged_ms)

    def take_back(self, waiter: Waiter) -> None:
        """The workers have not taken a request that was let in."""
        self.counters.charge(waiter.account, -waiter.charged_ms)
        if waiter.order is not None:
            self._rate.take_back(waiter.cost_ms)

    def started(self, waiter: Waiter, num_computed_tokens: int, device_ms: float) -> AnswerMeter:
        """The workers have taken a request; the prices learn from its route. Return what charges for its answers."""
        self.prices.routed(num_computed_tokens, device_ms)
        return AnswerMeter(self.counters, waiter.account, self.prices, waiter.num_answer_tokens)

    def stepped(self, worker: str, step_seconds: float, num_tokens: float) -> None:
        """A decode worker of the model has reported its steps since its last report.

        The first report of all makes what was charged until then right.
        """
        self._workers.add(worker)
        was_measured, assumed_ms = self.prices.is_measured, self.prices.ms_per_answer_token
        self.prices.stepped(step_seconds, num_tokens)
        if self.prices.is_measured and not was_measured:
            factor = self.prices.ms_per_answer_token / assumed_ms
            self.counters.scale(factor)
            self._rate.scale(factor)
            self._demands.scale(factor)
            for line in self._lines.values():
                line.scale(factor)

    def used_elsewhere(self, account: str, num_prompt_tokens: float, num_answer_tokens: float) -> None:
        """Other gateways' requests of an account have had so many tokens computed and sampled at the model's workers.

        So all gateways that an account asks count it alike, and one that asks at many has no more turns. While nobody
        waits here, that puts nobody in debt: accounts rejoin where it is.
        """
        if self.counters.knows(account):
            if not len(self):
                self.counters.let_in(account)
            self.counters.charge(account, self.prices.tokens_ms(num_prompt_tokens, num_answer_tokens))

    def worker_gone(self, worker: str) -> None:
        self._workers.discard(worker)

    def pass_by(self, waiter: Waiter, now: float) -> None:
        """A request need not wait: its account rejoins all the same."""
        self._demands.asked((waiter.service_class, waiter.account), waiter.cost_ms, now)
        self.counters.arrive(waiter.account)
        self.counters.leave(waiter.account)

    def predicted_wait_seconds(self, newcomer: Waiter, now: float) -> float | None:
        """Predict when the turn of a request would come that comes now, or waits; None: nothing is known.

        Its account's counter has then grown by the account's requests before it. Until then the other accounts get
        what their counters lack of that, as far as what waits and what they ask for goes.
        Until some were let in while others waited, a device is taken to do a second's work in a second.
        """
        rate = self._rate.ms_per_second(now) or 1000.0 * len(self._workers)
        if not rate:
            return None
        half_ms, before_ms, before_asked = self._rate.mean_ms / 2, sum(each.cost_ms for each in self._moving), 0.0
        for service_class, line in self._lines.items():
            if service_class > newcomer.service_class:
                before_ms += sum(line.cost_ms.values())
        own_line = self._lines.get(newcomer.service_class, _NOBODY)
        own_ms = own_line.before(newcomer)
        asked = {account: 0.0 for account in own_line.by_account if account != newcomer.account}
        for (service_class, account), rate_of_asker in self._demands.rates(now):
            if service_class > newcomer.service_class:
                before_asked += rate_of_asker
            elif service_class == newcomer.service_class and account != newcomer.account:
                asked[account] = rate_of_asker
        counters, least_ms = self.counters, self.counters.least_ms
        turn_ms = counters.rejoins_at(newcomer.account) + own_ms
        others = []
        for account, per_second in asked.items():
            own = own_line.by_account.get(account, ())
            used_ms = counters.of(account) if own else max(least_ms, counters.of(account))
            if used_ms <= turn_ms:
                waiting_ms = own_line.cost_ms.get(account, 0.0)
                others.append((waiting_ms, per_second, _before(turn_ms - used_ms, waiting_ms, len(own))))
        seconds = 0.0
        for _ in range(_NUM_ROUNDS):  # the longer it takes, the more others have asked for by then
            others_ms = sum(min(each + per_second * seconds, most) for each, per_second, most in others)
            seconds = (before_ms + before_asked * seconds + own_ms + others_ms + half_ms) / rate
        return seconds

    def too_late_seconds(self, newcomer: Waiter, budget: Budget, seconds: float, now: float) -> float | None:
        """Predict the wait of a request that comes now; None: it is well within `seconds` and its model's budget.

        A batch may wait in any case, and so may a request that has waited before or that moves.
        """
        if newcomer.order is not None or not _is_bound(newcomer):
            return None
        predicted = self.predicted_wait_seconds(newcomer, now)
        longest = longest_wait(budget, seconds)
        if predicted is not None and not self._rate.is_measured(now) and predicted <= _LULL * SURE * longest:
            return None
        return predicted if predicted is not None and predicted > SURE * longest > 0 else None

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
    _num_recent: float = 0.0
    """Requests of that sum, forgotten as it is."""
    _num_let_in: int = 0
    _began_at: float = 0.0
    """When requests began to wait that wait now, or waited last."""
    _num_let_in_since: int = 0

    def waits(self, now: float) -> None:
        """At least one request waits from now on."""
        self._advance(now)
        self._busy_since = self._began_at = now
        self._num_let_in_since = 0

    def is_measured(self, now: float) -> bool:
        """Whether enough were let in since requests began to wait: before, the rate is that of another load."""
        is_long = self._busy_since is not None and now - self._began_at >= _MIN_SECONDS
        return is_long and self._num_let_in_since >= _MIN_LET_IN

    def nobody_waits(self, now: float) -> None:
        self._advance(now)
        self._busy_since = None

    def let_in(self, cost_ms: float, now: float) -> None:
        self._advance(now)
        self._let_in_ms += cost_ms
        self._num_recent += 1
        self._num_let_in += 1
        self._num_let_in_since += 1

    def take_back(self, cost_ms: float) -> None:
        self._let_in_ms = max(0.0, self._let_in_ms - cost_ms)
        self._num_recent = max(0.0, self._num_recent - 1)
        self._num_let_in -= 1
        self._num_let_in_since -= 1

    def scale(self, factor: float) -> None:
        """The unit of costs has changed."""
        self._let_in_ms *= factor

    @property
    def mean_ms(self) -> float:
        """Return the cost of a request that was let in, on average."""
        return self._let_in_ms / self._num_recent if self._num_recent else 0.0

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
        self._num_recent *= kept
        self._busy_since = now


def _before(lacking_ms: float, waiting_ms: float, num_waiting: int) -> float:
    """Return what an account gets before its counter has grown by `lacking_ms`: whole requests, if any wait."""
    mean_ms = waiting_ms / num_waiting if num_waiting else 0.0
    return mean_ms * (math.floor(lacking_ms / mean_ms) + 1) if mean_ms > 0 else lacking_ms


def longest_wait(budget: Budget, seconds: float) -> float:
    """Return how long a request may wait, of the `seconds` that it has."""
    return seconds if budget.wait_seconds is None else min(seconds, budget.wait_seconds)


def seconds_left(waiter: Waiter, budget: Budget, now: float) -> float:
    """Return how long a waiting request may still wait by its model's budget: later it would come too late."""
    if budget.wait_seconds is None or not _is_bound(waiter):
        return math.inf
    return waiter.came_at + _LAST * budget.wait_seconds - now


def _is_bound(waiter: Waiter) -> bool:
    return not waiter.is_moving and waiter.service_class != ServiceClass.BATCH


def _order(waiter: Waiter) -> int:
    assert waiter.order is not None, "a waiting request has its place"
    return waiter.order
