"""What waits for a model, as workers hear of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

_MAX_ACCOUNTS = 16
MOVING = 2
"""The class of requests whose worker was lost: they go before all others."""
_NEW_WEIGHT = 0.1
"""Of the latest request in a moving average."""
_CHANGE = 1.25
"""By so much more or less, what waits is another demand."""


class Waiting(Protocol):
    """A request that waits."""

    account: str
    service_class: int
    is_moving: bool
    num_tokens: int
    num_choices: int
    num_prefill_tokens: int | None
    work: float
    came_at: float


@dataclass
class PrefillShare:
    """How much of a model's requests prefill workers compute, by those that were sent lately; at first: all."""

    requests: float = 1.0
    tokens: float = 1.0

    def sent(self, num_prefill_tokens: int, num_tokens: int) -> None:
        """A request was sent of whose prompt a prefill worker computes so many tokens; 0: none does."""
        self.requests += _NEW_WEIGHT * ((num_prefill_tokens > 0) - self.requests)
        self.tokens += _NEW_WEIGHT * (min(1.0, num_prefill_tokens / max(1, num_tokens)) - self.tokens)


@dataclass(frozen=True)
class AccountDemand:
    """Requests of one account and class that wait. Work is in tokens of an answer."""

    account: str
    service_class: int
    num_requests: int
    work: float
    since: float
    """When the first of them came."""


@dataclass(frozen=True)
class WaitingDemand:
    """A request with several answers counts as several."""

    num_tokens: int = 0
    num_requests: int = 0
    first_tokens: int = 0
    first_requests: int = 0
    accounts: tuple[AccountDemand, ...] = ()
    """Those that are next."""

    @classmethod
    def of(cls, waiting: Iterable[Waiting], first: Waiting | None, used: Callable[[int, str], float]) -> WaitingDemand:
        """`used` returns the counter of a class and account: the least is next."""
        if first is None:
            return cls()
        found = list(waiting)
        num_tokens = sum(each.num_tokens * each.num_choices for each in found)
        num_requests = sum(each.num_choices for each in found)
        first_tokens = first.num_tokens * first.num_choices
        return cls(num_tokens, num_requests, first_tokens, first.num_choices, _accounts(found, used))

    @classmethod
    def of_prompts(
        cls, waiting: Iterable[Waiting], first: Waiting | None, used: Callable[[int, str], float], share: PrefillShare
    ) -> WaitingDemand:
        """Return the same for prefill workers: what they would compute of it, each prompt once.

        Of requests that have not looked for room it is the usual `share`.
        """
        if first is None:
            return cls()
        num_unknown, num_tokens, found = 0, 0, []
        for each in waiting:
            if each.num_prefill_tokens is None:
                num_unknown += 1
                num_tokens += round(share.tokens * each.num_tokens)
            num_tokens += each.num_prefill_tokens or 0
            if each.num_prefill_tokens != 0:
                found.append(each)
        num_requests = len(found) - num_unknown + round(share.requests * num_unknown)
        if not num_requests:
            return cls()
        first_tokens = first.num_tokens if first.num_prefill_tokens is None else first.num_prefill_tokens
        num_tokens = max(num_tokens, first_tokens)
        first_tokens = first_tokens or -(-num_tokens // num_requests)
        return cls(num_tokens, num_requests, first_tokens, 1, _accounts(found, used, has_choices=False))

    def differs(self, other: WaitingDemand) -> bool:
        """Whether workers should hear of this one after the other."""
        if (self.first_tokens, self.first_requests) != (other.first_tokens, other.first_requests):
            return True
        if set(map(_head, self.accounts)) != set(map(_head, other.accounts)):
            return True
        pairs = (self.num_tokens, other.num_tokens), (self.num_requests, other.num_requests)
        return any(max(pair) > _CHANGE * min(pair) for pair in pairs)


def _head(demand: AccountDemand) -> tuple[int, str, float]:
    return demand.service_class, demand.account, demand.since


def _accounts(
    waiting: Sequence[Waiting], used: Callable[[int, str], float], *, has_choices: bool = True
) -> tuple[AccountDemand, ...]:
    by_account: dict[tuple[int, str], list[Waiting]] = {}
    for each in waiting:
        service_class = MOVING if each.is_moving else each.service_class
        by_account.setdefault((service_class, each.account), []).append(each)
    ranked = sorted(by_account, key=lambda each: (-each[0], used(*each)))[:_MAX_ACCOUNTS]
    return tuple(
        AccountDemand(
            account,
            service_class,
            sum(each.num_choices if has_choices else 1 for each in by_account[service_class, account]),
            sum(each.work for each in by_account[service_class, account]),
            min(each.came_at for each in by_account[service_class, account]),
        )
        for service_class, account in ranked
    )
