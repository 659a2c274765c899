"""Keeps the requests that wait for one model, and decides which is next, how many may wait, and how long they wait.

Order: requests whose worker was lost first, then by class, then the account with the least virtual counter, then by
arrival. A waiter that finds no room goes back to its place.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from control_plane.admission.budgets import Budget
from control_plane.admission.cached_shares import CachedShares
from control_plane.admission.elsewhere import AccountTurn, Elsewhere, LetIn
from control_plane.admission.let_in_rate import LetInRate
from control_plane.admission.prices import ASSUMED_MS_PER_ANSWER_TOKEN, Prices
from control_plane.admission.service_classes import ServiceClass
from control_plane.admission.waiting_demand import PrefillShare, WaitingDemand
from tandem_runtime.demands import Demands
from tandem_runtime.virtual_counters import AnswerMeter, VirtualCounters

_NUM_ROUNDS = 4
SURE = 0.5
"""A request may wait if its predicted wait is at most that part of what it may be: others may ask for more than before
by then, and who waits in vain is refused late."""
_LAST = 0.9
"""Who has not had its turn by then gets none: the prompt takes time, too."""
_LULL = 4.0
"""Until the rate is measured, so much more is let wait: workers have computed fewer requests at once, each at a higher
price, and a burst of requests ends that much sooner than their prices tell."""


@dataclass(eq=False)
class Waiter:
    """One request on its way in. It has its place among the waiting from the first time it waits."""

    model_id: str
    account: str
    service_class: int = ServiceClass.DEFAULT
    _: KW_ONLY
    num_tokens: int = 0
    """Of the prompt: what a worker must have free."""
    cost_ms: float = 1.0
    """Predicted device time of prompt and answer."""
    work: float = 0.0
    """That in tokens of an answer, once it has waited: their price changes with the batch, and the work does not."""
    num_answer_tokens: float = 0.0
    """Predicted."""
    charged_ms: float = 0.0
    """What its account was charged as it was let in."""
    deadline: float = math.inf
    """Its client's, by the clock of the queue."""
    is_moving: bool = False
    """Its worker was lost: it is before all others, and beyond the bounds."""
    has_begun: bool = False
    """Workers have done a part of it: it is beyond the bounds, too, but in its turn."""
    num_choices: int = 1
    """Answers that it asks for: a worker that is handed the prompt needs room for each."""
    num_prefill_tokens: int | None = None
    """That a prefill worker would compute, when it last looked for room; 0: none would; None: it has not looked."""
    has_come: bool = False
    """It counts to what its account asks for."""
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


class _Line:
    """The waiters of one class, by account and arrival."""

    def __init__(self) -> None:
        self.by_account: dict[str, list[Waiter]] = {}
        self.work: dict[str, float] = {}
        """Of each account's waiters together."""

    def add(self, waiter: Waiter) -> None:
        insort(self.by_account.setdefault(waiter.account, []), waiter, key=_order)
        self.work[waiter.account] = self.work.get(waiter.account, 0.0) + waiter.work

    def remove(self, waiter: Waiter) -> None:
        own = self.by_account[waiter.account]
        own.remove(waiter)
        self.work[waiter.account] -= waiter.work
        if not own:
            del self.by_account[waiter.account], self.work[waiter.account]

    def before(self, waiter: Waiter) -> float:
        """Return the work that its account has waiting before a request, which may be one of them."""
        if waiter.order is None:
            return self.work.get(waiter.account, 0.0)
        return sum(each.work for each in self.by_account.get(waiter.account, ()) if _order(each) < waiter.order)

    def first(self, counters: VirtualCounters) -> Waiter | None:
        heads = (own[0] for own in self.by_account.values())
        return min(heads, key=lambda waiter: (counters.of(waiter.account), _order(waiter)), default=None)

    def __iter__(self) -> Iterator[Waiter]:
        return (waiter for own in self.by_account.values() for waiter in own)


_NOBODY = _Line()


class ModelAdmission:
    """The waiting requests of one model; `now` is in monotonic seconds."""

    def __init__(self, bounds: Bounds, answer_token_ms: float = ASSUMED_MS_PER_ANSWER_TOKEN) -> None:
        """`answer_token_ms`: assumed until workers report steps."""
        self._bounds = bounds
        self.counters: defaultdict[int, VirtualCounters] = defaultdict(VirtualCounters)
        """By class."""
        self.prices = Prices(ms_per_answer_token=answer_token_ms)
        self._demands = Demands()
        self._elsewhere = Elsewhere()
        self.cached = CachedShares()
        self.prefill_share = PrefillShare()
        self._moving: list[Waiter] = []
        self._lines: dict[int, _Line] = {}
        self._num_by_account: Counter[str] = Counter()
        self._num_by_class: Counter[int] = Counter()
        self._looking: set[Waiter] = set()
        """Their turn has come, and they look for room: a worker may refuse, so they keep their places until they go."""
        self._num_arrived = 0
        self._workers: set[str] = set()
        """That have reported, and are still there."""
        self._granting: set[str] = set()
        """Those that grant."""
        self._rate = LetInRate()

    def __len__(self) -> int:
        return self._num_by_class.total()

    @property
    def num_by_class(self) -> dict[int, int]:
        """Return how many wait, by class; classes that nobody waits in may be left out."""
        return dict(self._num_by_class)

    def num_elsewhere(self, now: float) -> int:
        """Return how many requests wait at other gateways, as workers have told lately."""
        return sum(turn.num_requests for turn in self._elsewhere.waiting(now).values())

    def must_wait(self, waiter: Waiter) -> bool:
        """Whether a request that comes now is behind one that waits: of its class or a higher one, or moving."""
        if waiter.is_moving:
            return False
        return bool(self._moving) or any(service_class >= waiter.service_class for service_class in self._lines)

    def enter(self, waiter: Waiter, now: float, *, has_accounts: bool = True) -> None:
        """Let a request wait, at its place if it has waited before. Raise Full.

        `has_accounts`: accounts are told apart; else any caller takes any account's name.
        """
        is_back = waiter.order is not None
        if not is_back:
            if not waiter.is_moving:
                if not waiter.has_begun:
                    self.check_bounds(waiter, has_accounts=has_accounts)
                self._came(waiter, now)
            self._num_arrived += 1
            waiter.order, waiter.came_at = self._num_arrived, now
            self._weigh(waiter)
        self._looking.discard(waiter)
        waiter.tried_at = now
        if not len(self):
            self._rate.waits(now)
        self.counters[waiter.service_class].arrive(waiter.account, is_back=is_back)
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
        self.counters[waiter.service_class].leave(waiter.account)
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
        service_class = max(self._lines, default=None)
        return None if service_class is None else self._lines[service_class].first(self.counters[service_class])

    def _came(self, waiter: Waiter, now: float) -> None:
        """A request looks for room, or begins to wait: note it once."""
        if not waiter.has_come:
            waiter.has_come = True
            self._demands.asked((waiter.service_class, waiter.account), waiter.cost_ms, now)

    def demand(self) -> WaitingDemand:
        """Return what waits, for the workers that generate answers."""
        return WaitingDemand.of(self, self.first(), self._used)

    def prompt_demand(self) -> WaitingDemand:
        """Return what prefill workers would compute of that."""
        return WaitingDemand.of_prompts(self, self.first(), self._used, self.prefill_share)

    def _used(self, service_class: int, account: str) -> float:
        return self.counters[service_class].of(account) if service_class in self.counters else 0.0

    def let_in(self, waiter: Waiter, device_ms: float, now: float) -> None:
        """A request was sent to a worker, whose device its prompt takes for `device_ms`.

        Its account is charged for the answer in advance, as long as predicted: else it would have every turn until
        tokens come, and nobody could say when another's turn is.
        """
        if waiter.order is not None:
            self._weigh(waiter)
            self._rate.let_in(waiter.work, now)
        waiter.charged_ms = device_ms + waiter.num_answer_tokens * self.prices.ms_per_answer_token
        counters = self.counters[waiter.service_class]
        counters.let_in(waiter.account)
        counters.charge(waiter.account, waiter.charged_ms)

    def take_back(self, waiter: Waiter) -> None:
        """The workers have not taken a request that was let in."""
        self.counters[waiter.service_class].charge(waiter.account, -waiter.charged_ms)
        if waiter.order is not None:
            self._rate.take_back(waiter.work)

    def started(self, waiter: Waiter, num_computed_tokens: int, device_ms: float) -> AnswerMeter:
        """The workers have taken a request; the prices learn from its route. Return what charges for its answers."""
        self.prices.routed(num_computed_tokens, device_ms)
        counters, prices, account = self.counters[waiter.service_class], self.prices, waiter.account
        return AnswerMeter(
            lambda num_tokens: counters.charge(account, num_tokens * prices.ms_per_answer_token),
            waiter.num_answer_tokens,
        )

    def granted(self, worker: str, turns: Iterable[AccountTurn], let_in: LetIn, now: float) -> None:
        """A worker's grant tells what waits at other gateways, and what they have let in since its stream began.

        Then accounts are in the worker's order here, and in the same at all gateways.
        """
        if worker not in self._granting:
            self._granting.add(worker)
            self._count_workers(now)
        new = self._elsewhere.take(worker, turns, let_in, now)
        if not len(self):
            return
        if new.num_requests:
            self._rate.let_in(new.work, now, new.num_requests)
        token_ms = self.prices.ms_per_answer_token
        for service_class, leads in self._elsewhere.leads().items():
            if service_class in self.counters:
                self.counters[service_class].follow({account: token_ms * lead for account, lead in leads.items()})

    def stepped(self, worker: str, step_seconds: float, num_tokens: float, now: float) -> None:
        """A decode worker of the model has reported its steps since its last report.

        The first report of all makes what was charged until then right.
        """
        if worker not in self._workers:
            self._workers.add(worker)
            self._count_workers(now)
        was_measured, assumed_ms = self.prices.is_measured, self.prices.ms_per_answer_token
        self.prices.stepped(step_seconds, num_tokens)
        if self.prices.is_measured and not was_measured:
            factor = self.prices.ms_per_answer_token / assumed_ms
            for counters in self.counters.values():
                counters.scale(factor)
            self._demands.scale(factor)

    def used_elsewhere(
        self, service_class: int, account: str, num_prompt_tokens: float, num_answer_tokens: float
    ) -> None:
        """Other gateways' requests of an account have had so many tokens computed and sampled at the model's workers.

        For the simulator, whose workers grant nothing; from grants comes the same, and more (`turns`). So all gateways
        that an account asks count it alike. While nobody waits here, that puts nobody in debt: accounts rejoin where it
        is.
        """
        counters = self.counters[service_class]
        if counters.knows(account):
            if not len(self):
                counters.let_in(account)
            counters.charge(account, self.prices.tokens_ms(num_prompt_tokens, num_answer_tokens))

    def worker_gone(self, worker: str, now: float) -> None:
        self._workers.discard(worker)
        self._granting.discard(worker)
        self._elsewhere.forget(worker)
        self._count_workers(now)

    def _weigh(self, waiter: Waiter) -> None:
        """Note the work of a request when it is first counted."""
        waiter.work = waiter.work or waiter.cost_ms / self.prices.ms_per_answer_token

    def _count_workers(self, now: float) -> None:
        self._rate.changed(len(self._workers | self._granting), now)

    def pass_by(self, waiter: Waiter, now: float) -> None:
        """A request need not wait: its account rejoins all the same."""
        self._came(waiter, now)
        counters = self.counters[waiter.service_class]
        counters.arrive(waiter.account)
        counters.leave(waiter.account)

    def predicted_wait_seconds(self, newcomer: Waiter, now: float) -> float | None:
        """Predict when the turn of a request would come that comes now, or waits; None: nothing is known.

        Its account's counter has then grown by the account's requests before it. Until then the other accounts get
        what their counters lack of that, as far as what waits and what they ask for goes. What waits at other gateways
        counts as what waits here.
        Until some were let in while others waited, a device is taken to do a second's work in a second.
        """
        token_ms = self.prices.ms_per_answer_token
        rate = self._rate.per_second(now) * token_ms or 1000.0 * len(self._workers)
        if not rate:
            return None
        own_class = newcomer.service_class
        before, before_asked = sum(each.work for each in self._moving), 0.0
        for service_class, line in self._lines.items():
            if service_class > own_class:
                before += sum(line.work.values())
        line = self._lines.get(own_class, _NOBODY)
        others = {account: _Other(len(own), line.work[account]) for account, own in line.by_account.items()}
        for (service_class, account), rate_of_asker in self._demands.rates(now):
            if service_class > own_class:
                before_asked += rate_of_asker
            elif service_class == own_class:
                others.setdefault(account, _Other()).asked_ms = rate_of_asker
        own_work = line.before(newcomer)
        for (service_class, account), turn in self._elsewhere.waiting(now).items():
            if service_class > own_class:
                before += turn.work
            elif service_class == own_class:
                other = others.setdefault(account, _Other())
                other.num += turn.num_requests
                other.work += turn.work
                own_work += turn.work if account == newcomer.account else 0.0
        for (service_class, account), work_per_second in self._elsewhere.work_per_second(now).items():
            if service_class > own_class:
                before_asked += token_ms * work_per_second
            elif service_class == own_class:
                others.setdefault(account, _Other()).asked_ms += token_ms * work_per_second
        own_ms, before_ms = token_ms * own_work, token_ms * before + token_ms * self._rate.mean_work / 2
        counters = self.counters[own_class]
        turn_ms, least_ms = counters.rejoins_at(newcomer.account) + own_ms, counters.least_ms
        lacking: list[tuple[_Other, float, float]] = []
        for account, other in others.items():
            used_ms = counters.of(account) if other.num else max(least_ms, counters.of(account))
            if account != newcomer.account and used_ms <= turn_ms:
                waiting_ms = token_ms * other.work
                lacking.append((other, waiting_ms, _before(turn_ms - used_ms, waiting_ms, other.num)))
        seconds = 0.0
        for _ in range(_NUM_ROUNDS):  # the longer it takes, the more others have asked for by then
            others_ms = sum(min(waiting_ms + other.asked_ms * seconds, most) for other, waiting_ms, most in lacking)
            seconds = (before_ms + before_asked * seconds + own_ms + others_ms) / rate
        return seconds

    def too_late_seconds(self, newcomer: Waiter, budget: Budget, seconds: float, now: float) -> float | None:
        """Predict the wait of a request that comes now; None: it is well within `seconds` and its model's budget.

        A batch may wait in any case, and so may a request that has waited before or that moves.
        """
        if newcomer.order is not None or not _is_bound(newcomer):
            return None
        predicted = self.predicted_wait_seconds(newcomer, now)
        longest = longest_wait(budget, seconds)
        if predicted is not None and not self._rate.is_measured and predicted <= _LULL * SURE * longest:
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
class _Other:
    """What an account has waiting at all gateways, in the class of a request whose wait is predicted."""

    num: int = 0
    work: float = 0.0
    asked_ms: float = 0.0
    """Device time that it asks for per second."""


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
    return not (waiter.is_moving or waiter.has_begun) and waiter.service_class != ServiceClass.BATCH


def _order(waiter: Waiter) -> int:
    assert waiter.order is not None, "a waiting request has its place"
    return waiter.order
