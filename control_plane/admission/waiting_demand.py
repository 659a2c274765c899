"""What waits for a model, as workers hear of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

_MAX_ACCOUNTS = 16
_NEW_WEIGHT = 0.1
"""Of the latest request in a moving average."""
_CHANGE = 1.25
"""By so much more or less, what waits is another demand."""


class Waiting(Protocol):
    """A request that waits."""

    account: str
    num_tokens: int
    num_choices: int
    num_prefill_tokens: int | None


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
class WaitingDemand:
    """A request with several answers counts as several."""

    num_tokens: int = 0
    num_requests: int = 0
    first_tokens: int = 0
    first_requests: int = 0
    accounts: tuple[tuple[str, int], ...] = ()
    """Those that wait with the most tokens, and what they have asked for lately, refused or not, in tokens of prompts.

    Were it what waits, a gateway that gets less would let less wait, and get less again.
    """

    @classmethod
    def of(cls, waiting: Iterable[Waiting], first: Waiting | None, asked: Mapping[str, float]) -> WaitingDemand:
        """`asked`: tokens by account."""
        if first is None:
            return cls()
        num_requests, accounts = 0, Counter[str]()
        for each in waiting:
            num_requests += each.num_choices
            accounts[each.account] += each.num_tokens * each.num_choices
        first_tokens = first.num_tokens * first.num_choices
        return cls(accounts.total(), num_requests, first_tokens, first.num_choices, _asked_of(accounts, asked))

    @classmethod
    def of_prompts(
        cls, waiting: Iterable[Waiting], first: Waiting | None, asked: Mapping[str, float], share: PrefillShare
    ) -> WaitingDemand:
        """Return the same for prefill workers: what they would compute of it, each prompt once.

        Of requests that have not looked for room it is the usual `share`.
        """
        if first is None:
            return cls()
        num_known, num_unknown, accounts = 0, 0, Counter[str]()
        for each in waiting:
            num_tokens = each.num_prefill_tokens
            if num_tokens is None:
                num_unknown += 1
                accounts[each.account] += round(share.tokens * each.num_tokens)
            elif num_tokens:
                num_known += 1
                accounts[each.account] += num_tokens
        num_requests = num_known + round(share.requests * num_unknown)
        if not num_requests:
            return cls()
        first_tokens = first.num_tokens if first.num_prefill_tokens is None else first.num_prefill_tokens
        num_tokens = max(accounts.total(), first_tokens)
        of_accounts = _asked_of(accounts, asked)
        return cls(num_tokens, num_requests, first_tokens or -(-num_tokens // num_requests), 1, of_accounts)

    def differs(self, other: WaitingDemand) -> bool:
        """Whether workers should hear of this one after the other."""
        if (self.first_tokens, self.first_requests) != (other.first_tokens, other.first_requests):
            return True
        if {account for account, _ in self.accounts} != {account for account, _ in other.accounts}:
            return True
        pairs = (self.num_tokens, other.num_tokens), (self.num_requests, other.num_requests)
        return any(max(pair) > _CHANGE * min(pair) for pair in pairs)


def _asked_of(accounts: Counter[str], asked: Mapping[str, float]) -> tuple[tuple[str, int], ...]:
    most = accounts.most_common(_MAX_ACCOUNTS)
    return tuple((name, max(1, round(asked.get(name, num)))) for name, num in most if num)
