"""What waits for a model, as workers hear of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

_MAX_ACCOUNTS = 16
_CHANGE = 1.25
"""By so much more or less, what waits is another demand."""


class Waiting(Protocol):
    """A request that waits."""

    account: str
    num_tokens: int
    num_choices: int


@dataclass(frozen=True)
class WaitingDemand:
    """A request with several answers counts as several."""

    num_tokens: int = 0
    num_requests: int = 0
    first_tokens: int = 0
    first_requests: int = 0
    accounts: tuple[tuple[str, int], ...] = ()
    """Those with the most waiting tokens, and their tokens."""

    @classmethod
    def of(cls, waiting: Iterable[Waiting], first: Waiting | None) -> WaitingDemand:
        if first is None:
            return cls()
        num_requests, accounts = 0, Counter[str]()
        for each in waiting:
            num_requests += each.num_choices
            accounts[each.account] += each.num_tokens * each.num_choices
        first_tokens = first.num_tokens * first.num_choices
        most = tuple(accounts.most_common(_MAX_ACCOUNTS))
        return cls(accounts.total(), num_requests, first_tokens, first.num_choices, most)

    def differs(self, other: WaitingDemand) -> bool:
        """Whether workers should hear of this one after the other."""
        if (self.first_tokens, self.first_requests) != (other.first_tokens, other.first_requests):
            return True
        if {account for account, _ in self.accounts} != {account for account, _ in other.accounts}:
            return True
        pairs = (self.num_tokens, other.num_tokens), (self.num_requests, other.num_requests)
        return any(max(pair) > _CHANGE * min(pair) for pair in pairs)
