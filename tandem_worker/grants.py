"""Divides a worker's room among the gateways attached to it, so that they share it without asking each other.

A grant says how much a gateway may have submitted on its Attach stream in all: tokens and requests, since the stream
began. Both ends count the same Submits, so a grant that crosses with a Submit on its way means the same to both. Grants
are numbered; the latest one that a gateway has got holds, until it expires. Room that was granted and not used is free
again when the gateway has seen a lower grant, when its last one has expired, or when its stream ends.

Gateways whose requests wait come first, in the order of `account_order.py`. What is left is divided equally, for
requests that will come.

No clock, no loop, no message: `now` is in monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tandem_worker.account_order import REST_CLASS, AccountDemand, AccountOrder, AccountTurn

VALID_SECONDS = 2.0
"""A gateway may use a grant for so long after it has got it."""
RENEW_SECONDS = 1.0
_TELL_SECONDS, _TELL_SECONDS_PER_WORKER = 0.2, 0.002
"""While requests wait at several gateways, each hears so often what waits at the others: from all workers together 500
times a second at most."""
_MARGIN_SECONDS = 0.5
"""A Submit may be on its way for so long after its grant has expired at the gateway."""
_DUE_SECONDS = 5.0
"""A request that waits longer for a grant that it fits has a turn: until then, what is free is kept for it."""
UNUSED_SECONDS = 0.25
"""A gateway that waits and leaves its grant unused for so long, of a worker that grants in order, has had a turn."""
_STUCK_SECONDS = 2.0
"""A gateway where requests wait and that says nothing for so long is stopped or lost: others say that each second.
Where requests pass each other, it has left a grant unused for so long, too."""
_SAME_SECONDS = 0.1
"""Two reports of one request tell its age in whole milliseconds, and may take unequally long."""
_IDLE_SECONDS = 5.0
"""A gateway that has used and asked for nothing for so long gets no grants, until it does: a message a second less."""
_MOST_STEPS = 64
"""What waits is given room in about so many steps: several requests at once if there is more room."""

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Room:
    """What a worker can take beside the requests that it has got."""

    num_tokens: int
    """Of its KV pool."""
    num_requests: int
    tokens_per_request: int = 0
    """That a request may need beside its own, because blocks are whole and answers grow."""
    most_tokens: int = 0
    """Of the whole pool: a request that needs more is not waited for."""
    takes_any: bool = False
    """It may be asked to take one request of any size: it has none, or little left to compute."""
    in_order: bool = False
    """Nothing passes what is first and does not fit: its room comes soon, and the worker has work until then."""


@dataclass(frozen=True)
class Demand:
    """The requests of one gateway that wait for a worker of the model."""

    num_tokens: int = 0
    num_requests: int = 0
    first_tokens: int = 0
    """Of the request that is next: it needs a grant of so many tokens."""
    first_requests: int = 1
    """More than one if that request asks for several answers."""
    accounts: tuple[AccountDemand, ...] = ()
    """Those of the requests that are next; empty: of one account, all came at once."""
    num_workers: int = 1
    """That hear of them."""


@dataclass(frozen=True)
class Grant:
    """How much a gateway may have submitted since its stream began."""

    number: int
    num_tokens: int
    num_requests: int
    valid_seconds: float = VALID_SECONDS
    turns: tuple[AccountTurn, ...] = ()
    """Of all accounts that wait, if any wait at other gateways."""
    work_elsewhere: float = 0.0
    """Of other gateways' requests that have come since the stream began."""
    num_elsewhere: int = 0
    """Such requests."""


@dataclass
class _Amount:
    num_tokens: int = 0
    num_requests: int = 0


@dataclass
class _Work:
    work: float = 0.0
    num_requests: int = 0


@dataclass(frozen=True)
class _Sent:
    grant: Grant
    until: float


@dataclass(eq=False)
class _Gateway:
    order: int
    demand: Demand = field(default_factory=Demand)
    demanded_at: float = float("-inf")
    received: _Amount = field(default_factory=_Amount)
    """Submitted under grants since the stream began."""
    sent: deque[_Sent] = field(default_factory=deque)
    """The grants that the gateway may still use: those since the one that it has seen last, and none within another."""
    number: int = 0
    needed_at: float = float("-inf")
    """When it had its first grant, last used one or said what waits."""
    sent_at: float = float("-inf")
    rank: int = 0
    """Its first turn in the division that is being made."""
    elsewhere: _Work = field(default_factory=_Work)
    """Other gateways' requests since the stream began."""
    mean_tokens: float = 0.0
    """Of a request; 0.0: none has come."""
    unmet_since: float | None = None
    """Since when its first request has had no grant that it fits; None: it has, or nothing waits."""
    unused_since: float | None = None
    """Since when it has had one, and has submitted nothing; None: it has none, or nothing waits."""
    is_picky: bool = False
    """It has left a turn unused, and sent nothing since: it gets room for its first request only."""
    is_stuck: bool = False
    """It is stopped or lost. Nothing waits there until it submits a request, or says what waits."""

    @property
    def waits(self) -> bool:
        return self.demand.num_requests > 0 and not self.is_stuck

    @property
    def is_new(self) -> bool:
        """Whether it has had no grant yet. The others give back its part at once: its requests may be on their way."""
        return not self.number

    def is_due(self, now: float) -> bool:
        return self.unmet_since is not None and now - self.unmet_since >= _DUE_SECONDS

    def gets_stuck(self, now: float, *, in_order: bool) -> bool:
        """Whether requests wait there, and it has long sent nothing and said nothing.

        A grant that its first request fits is only looked at where requests pass each other: others pass it there.
        """
        if not self.waits or not (in_order or self.unused_since is not None):
            return False
        since = self.needed_at if in_order else max(self.unused_since or 0.0, self.needed_at)
        return now - since >= _STUCK_SECONDS + _TELL_SECONDS_PER_WORKER * self.demand.num_workers

    def is_idle(self, now: float) -> bool:
        """Whether it needs no grant: the first requests after a pause come without one."""
        return self.is_stuck or (self.number > 0 and not self.waits and now - self.needed_at >= _IDLE_SECONDS)

    def lacks(self, has: _Amount) -> bool:
        """Whether requests wait that do not fit into what the gateway has."""
        demand = self.demand
        return self.waits and (has.num_requests < demand.num_requests or has.num_tokens < demand.num_tokens)

    def outstanding(self) -> _Amount:
        """Return what the gateway may still submit."""
        tokens = max((each.grant.num_tokens for each in self.sent), default=0)
        requests = max((each.grant.num_requests for each in self.sent), default=0)
        return _Amount(max(0, tokens - self.received.num_tokens), max(0, requests - self.received.num_requests))

    def forget_expired(self, now: float) -> None:
        while self.sent and self.sent[0].until <= now:
            self.sent.popleft()

    def seen(self, number: int) -> None:
        """The gateway uses no grant before this one; what it has submitted under them has come."""
        while len(self.sent) > 1 and self.sent[0].grant.number < number:
            self.sent.popleft()

    def next_requests(self, num_given: int, num_at_once: int) -> _Amount:
        """Return the size of what is next, when room for `num_given` waiting requests was given."""
        demand = self.demand
        num_first = max(1, demand.first_requests)
        if not num_given:
            return _Amount(demand.first_tokens, num_first)
        num_rest = max(1, demand.num_requests - num_first)
        num = max(1, min(num_at_once, demand.num_requests - num_given))
        return _Amount(num * -(-max(0, demand.num_tokens - demand.first_tokens) // num_rest), num)


class GrantDivider(Generic[_Key]):
    """The grants of one worker, by gateway."""

    def __init__(self) -> None:
        self._gateways: dict[_Key, _Gateway] = {}
        self._order: AccountOrder[_Key] = AccountOrder()
        self._num_attached = 0

    def __len__(self) -> int:
        return len(self._gateways)

    def __contains__(self, key: _Key) -> bool:
        return key in self._gateways

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait at a gateway."""
        return any(each.waits for each in self._gateways.values())

    def outstanding(self) -> tuple[int, int]:
        """Return the tokens and requests that gateways may still submit under their grants."""
        amounts = [each.outstanding() for each in self._gateways.values()]
        return sum(each.num_tokens for each in amounts), sum(each.num_requests for each in amounts)

    def of(self, key: _Key, now: float) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the tokens and requests that a gateway has submitted under grants, and those that it still may."""
        gateway = self._gateways[key]
        gateway.forget_expired(now)
        received, left = gateway.received, gateway.outstanding()
        return (received.num_tokens, received.num_requests), (left.num_tokens, left.num_requests)

    def attach(self, key: _Key) -> None:
        self._num_attached += 1
        self._gateways[key] = _Gateway(self._num_attached)

    def detach(self, key: _Key) -> None:
        """The stream has ended: what was granted on it is free at once."""
        self._gateways.pop(key, None)
        self._order.forget(key)

    def seen(self, key: _Key, number: int) -> None:
        """A gateway has got a grant, and uses those before it no more."""
        self._gateways[key].seen(number)

    def demanded(self, key: _Key, demand: Demand, now: float) -> None:
        """Take in what waits at a gateway."""
        gateway = self._gateways[key]
        if not demand.num_requests or not _is_same_first(gateway.demand, gateway.demanded_at, demand, now):
            gateway.unmet_since = None
        gateway.demand, gateway.is_stuck = demand, False
        gateway.demanded_at = gateway.needed_at = now
        self._order.demanded(key, _accounts(demand), now)

    def submitted(self, key: _Key, num_tokens: int, now: float, num_requests: int = 1) -> None:
        """Requests have come, or are on their way, that count so many tokens under the gateway's grants together."""
        gateway = self._gateways[key]
        gateway.received.num_tokens += num_tokens
        gateway.received.num_requests += num_requests
        gateway.mean_tokens += (num_tokens / num_requests - gateway.mean_tokens) * (0.1 if gateway.mean_tokens else 1.0)
        self._needs(key, gateway, now)
        gateway.unused_since, gateway.is_picky = None, False
        if num_tokens >= gateway.demand.first_tokens:  # else one that is larger may still have no grant that it fits
            gateway.unmet_since = None

    def let_in(self, key: _Key, account: str, work: float, now: float, service_class: int = 0) -> None:
        """Charge a gateway's request to its account: its prompt and its predicted answer, in tokens of an answer."""
        self._order.let_in(key, account, work, now, service_class)
        for other, gateway in self._gateways.items():
            if other != key:
                gateway.elsewhere.work += work
                gateway.elsewhere.num_requests += 1

    def charge(self, account: str, work: float, service_class: int = 0) -> None:
        """An account uses the worker for more than it was charged for, or for less."""
        self._order.charge(account, work, service_class)

    def divide(self, room: Room, now: float) -> dict[_Key, Grant]:
        """Return the grants that are to be sent now."""
        for key, gateway in self._items():
            gateway.forget_expired(now)
            if gateway.gets_stuck(now, in_order=room.in_order):
                gateway.is_stuck = True
                self._order.demanded(key, (), now)
            elif room.in_order:
                self._pass_unused(key, gateway, now)
        targets = self._targets(room, now)
        out = {key: gateway.outstanding() for key, gateway in self._items()}
        # A worker that takes a request of any size is asked to: then the targets are more than there is.
        left = _Amount(
            max(room.num_tokens, sum(each.num_tokens for each in targets.values())),
            max(room.num_requests, sum(each.num_requests for each in targets.values())),
        )
        left.num_tokens -= sum(each.num_tokens for each in out.values())
        left.num_requests -= sum(each.num_requests for each in out.values())
        must_lower = any(
            (each.is_new or each.lacks(out[key])) and _is_less(out[key], targets[key]) for key, each in self._items()
        )
        grants: dict[_Key, Grant] = {}
        for key, gateway in sorted(self._items(), key=lambda item: (item[1].rank, item[1].order)):
            target, has = targets[key], out[key]
            gets = _Amount(
                _next(has.num_tokens, target.num_tokens, left.num_tokens),
                _next(has.num_requests, target.num_requests, left.num_requests),
            )
            if self._is_worth_sending(gateway, has, gets, now, must_lower):
                left.num_tokens -= max(0, gets.num_tokens - has.num_tokens)
                left.num_requests -= max(0, gets.num_requests - has.num_requests)
                grants[key] = self._grant(key, gateway, gets, now)
            _note_unmet(gateway, now)
        return grants

    def renewed(self, key: _Key, room: Room, now: float) -> dict[_Key, Grant]:
        """Return the grants to be sent now, one for this gateway among them: it is waiting for it."""
        gateway = self._gateways[key]
        self._needs(key, gateway, now)
        gateway.sent_at = float("-inf")
        return self.divide(room, now)

    def _needs(self, key: _Key, gateway: _Gateway, now: float) -> None:
        """A gateway has sent a request: it is alive, and needs grants."""
        gateway.needed_at = now
        if gateway.is_stuck:
            gateway.is_stuck, gateway.unused_since = False, None
            self._order.demanded(key, _accounts(gateway.demand), gateway.demanded_at)

    def _targets(self, room: Room, now: float) -> dict[_Key, _Amount]:
        """Return what each gateway should be able to submit, if nothing had been granted yet."""
        for gateway in self._gateways.values():
            gateway.rank = 0
        shares = {key: _Amount() for key in self._gateways}
        left = _Amount(max(0, room.num_tokens), max(0, room.num_requests))
        if not shares or not left.num_requests or self._give_to_waiting(room, shares, left, now):
            return shares
        sharing = self._sharing(room, now)
        ranked = sorted(sharing, key=lambda key: (shares[key].num_requests, self._gateways[key].order))
        for position, key in enumerate(ranked):  # what is left, in equal parts
            num_others = len(ranked) - position
            requests, tokens = -(-left.num_requests // num_others), left.num_tokens // num_others
            shares[key].num_requests += requests
            shares[key].num_tokens += tokens
            left.num_requests -= requests
            left.num_tokens -= tokens
        return shares

    def _give_to_waiting(self, room: Room, shares: dict[_Key, _Amount], left: _Amount, now: float) -> bool:
        """Give room to what waits, in its order. Return whether the rest is kept for one that waits.

        If there are places for all gateways, each of those that do not wait keeps one.
        """
        kept, num_at_once = _Amount(), max(1, left.num_requests // _MOST_STEPS)
        if not room.in_order and self._keeps_for_due(room, shares, left, now):
            return True
        if left.num_requests >= len(shares):
            idle = [each for each in map(self._gateways.__getitem__, self._sharing(room, now)) if not each.waits]
            kept = _Amount(min(int(sum(each.mean_tokens for each in idle)), left.num_tokens // 2), len(idle))
        turns = self._order.turns(now)
        num_given = sum(each.num_requests > 0 for each in shares.values())
        while (key := turns.next()) is not None and left.num_requests > kept.num_requests:
            gateway, share = self._gateways[key], shares[key]
            asked = gateway.next_requests(share.num_requests, num_at_once)
            if _fits(asked, room, left, kept) or (room.takes_any and not num_given):
                num_given += 1
                gateway.rank = min(gateway.rank, num_given - len(shares))
                _take(asked, room, share, left)
                turns.took(asked.num_requests)
                if gateway.is_picky or share.num_requests >= gateway.demand.num_requests:
                    turns.skip(key)
            elif room.in_order:
                self._give_kept(room, shares, kept, now)
                return True
            else:
                turns.skip(key)
        return False

    def _sharing(self, room: Room, now: float) -> list[_Key]:
        """Return the gateways that get parts of what nobody waits for.

        Of a worker's half a second, those where nothing happens would keep what others soon need; memory is larger.
        """
        return [key for key, each in self._items() if not (room.in_order and each.is_idle(now))]

    def _give_kept(self, room: Room, shares: dict[_Key, _Amount], kept: _Amount, now: float) -> None:
        """Give the gateways where nothing waits what was kept for them."""
        for key in self._sharing(room, now):
            if kept.num_requests and not self._gateways[key].waits:
                shares[key].num_requests += 1
                shares[key].num_tokens += kept.num_tokens // kept.num_requests

    def _keeps_for_due(self, room: Room, shares: dict[_Key, _Amount], left: _Amount, now: float) -> bool:
        """Give to those whose turn has come, first to the one that waits longest. Return whether it needs more."""
        due = [(each.unmet_since or 0.0, each.order, key) for key, each in self._items() if each.is_due(now)]
        has_given = False
        for _, _, key in sorted(due):
            asked = self._gateways[key].next_requests(0, 1)
            if _fits(asked, room, left, _Amount()) or (room.takes_any and not has_given):
                has_given = True
                _take(asked, room, shares[key], left)
            elif asked.num_tokens + asked.num_requests * room.tokens_per_request <= room.most_tokens:
                return True
        return False

    def _items(self) -> Iterable[tuple[_Key, _Gateway]]:
        return self._gateways.items()

    def _grant(self, key: _Key, gateway: _Gateway, gets: _Amount, now: float) -> Grant:
        gateway.number += 1
        gateway.sent_at = now
        if gateway.number == 1:
            gateway.needed_at = now
        grant = Grant(
            gateway.number,
            gateway.received.num_tokens + gets.num_tokens,
            gateway.received.num_requests + gets.num_requests,
            turns=tuple(self._order.told(key, now)),
            work_elsewhere=gateway.elsewhere.work,
            num_elsewhere=gateway.elsewhere.num_requests,
        )
        while gateway.sent and _is_within(gateway.sent[-1].grant, grant):
            gateway.sent.pop()
        gateway.sent.append(_Sent(grant, now + VALID_SECONDS + _MARGIN_SECONDS))
        return grant

    def _renew_seconds(self, gateway: _Gateway) -> float:
        """Return how long a grant is left as it is: shorter where a gateway must know what waits at others."""
        if not gateway.waits or not any(each.waits for each in self._gateways.values() if each is not gateway):
            return RENEW_SECONDS
        return min(RENEW_SECONDS, max(_TELL_SECONDS, _TELL_SECONDS_PER_WORKER * gateway.demand.num_workers))

    def _pass_unused(self, key: _Key, gateway: _Gateway, now: float) -> None:
        """Let others go before a gateway that waits for something else, and keeps the room from them."""
        if gateway.unused_since is None or now - gateway.unused_since < UNUSED_SECONDS:
            return
        gateway.unused_since = now
        if any(each.lacks(each.outstanding()) for each in self._gateways.values() if each is not gateway):
            self._order.passes(key, max(1, gateway.demand.first_requests), now)
            gateway.is_picky = True

    def _is_worth_sending(self, gateway: _Gateway, has: _Amount, gets: _Amount, now: float, must_lower: bool) -> bool:
        """Whether a gateway should hear of a new amount now, and not with the next renewal."""
        if must_lower and _is_less(gets, has):
            return True
        if gateway.is_idle(now):
            return False
        if now - gateway.sent_at >= self._renew_seconds(gateway):
            return True
        if gateway.lacks(has) and _is_less(has, gets):
            return True
        return 2 * has.num_tokens < gets.num_tokens or 2 * has.num_requests < gets.num_requests


def _accounts(demand: Demand) -> tuple[AccountDemand, ...]:
    """Return what waits by account; what a gateway does not tell of comes last."""
    num_rest = demand.num_requests - sum(each.num_requests for each in demand.accounts)
    rest = AccountDemand("", REST_CLASS if demand.accounts else 0, num_rest)
    return (*demand.accounts, rest) if num_rest > 0 else demand.accounts


def _is_same_first(old: Demand, then: float, new: Demand, now: float) -> bool:
    """Whether the request that is next may be the one that was next: by its age, and its account."""
    if old.first_tokens != new.first_tokens or not old.accounts or not new.accounts:
        return old.first_tokens == new.first_tokens
    was, one = old.accounts[0], new.accounts[0]
    aged = abs((now - one.waited_seconds) - (then - was.waited_seconds)) <= _SAME_SECONDS
    return aged and (was.service_class, was.account) == (one.service_class, one.account)


def _is_less(some: _Amount, other: _Amount) -> bool:
    return some.num_tokens < other.num_tokens or some.num_requests < other.num_requests


def _next(has: int, target: int, left: int) -> int:
    """Return the next amount on the way to the target: no more is added than nobody else has."""
    return target if target <= has else has + max(0, min(target - has, left))


def _fits(asked: _Amount, room: Room, left: _Amount, kept: _Amount) -> bool:
    num_tokens = asked.num_tokens + asked.num_requests * room.tokens_per_request
    return (
        asked.num_requests <= left.num_requests - kept.num_requests and num_tokens <= left.num_tokens - kept.num_tokens
    )


def _take(asked: _Amount, room: Room, share: _Amount, left: _Amount) -> None:
    share.num_tokens += asked.num_tokens
    share.num_requests += asked.num_requests
    num_tokens = asked.num_tokens + asked.num_requests * room.tokens_per_request
    left.num_tokens = max(0, left.num_tokens - num_tokens)
    left.num_requests = max(0, left.num_requests - asked.num_requests)


def _is_within(some: Grant, other: Grant) -> bool:
    return some.num_tokens <= other.num_tokens and some.num_requests <= other.num_requests


def _note_unmet(gateway: _Gateway, now: float) -> None:
    has, demand = gateway.outstanding(), gateway.demand
    is_met = has.num_tokens >= demand.first_tokens and has.num_requests >= max(1, demand.first_requests)
    if not gateway.waits or is_met:
        gateway.unmet_since = None
    elif gateway.unmet_since is None:
        gateway.unmet_since = now
    if not gateway.waits or not is_met:
        gateway.unused_since = None
    elif gateway.unused_since is None:
        gateway.unused_since = now
