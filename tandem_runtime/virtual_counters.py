"""Counts the device time that each account has used of one model, for a fair order of those that wait.

Each class of requests has counters of its own: a batch may wait for hours, and must not be what others are compared to.

The next request is that of the account with the least counter. After "Fairness in Serving Large Language Models"
(Sheng et al., OSDI 2024, algorithm 2), with milliseconds of a device in place of tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

_MAX_KEPT = 10_000
"""Accounts whose counters are kept; of those without a waiting request, the least recently charged are dropped."""


class VirtualCounters:
    """Device milliseconds by account, of one class. What one has used beyond its share it carries on, as debt."""

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._used_ms: OrderedDict[str, float] = OrderedDict()
        self._num_waiting: Counter[str] = Counter()
        self._floor_ms = 0.0
        """The counter of the account that was let in last: where accounts rejoin while nobody waits."""

    def __len__(self) -> int:
        return len(self._used_ms)

    def of(self, account: str) -> float:
        return self._used_ms.get(account, self._floor_ms)

    def __contains__(self, account: str) -> bool:
        """Return whether requests of an account wait."""
        return account in self._num_waiting

    def arrive(self, account: str, *, is_back: bool = False) -> None:
        """A request begins to wait. An idle account rejoins at the least counter of those that wait: it saves nothing.

        Call `leave` once the request waits no more. `is_back`: it has waited before, and was not idle.
        """
        if account not in self._num_waiting and not is_back:
            self._set(account, self.rejoins_at(account))
        self._num_waiting[account] += 1

    def rejoins_at(self, account: str) -> float:
        """Return the counter of an account whose request would begin to wait now."""
        if account in self._num_waiting:
            return self.of(account)
        return max(self.of(account), self.least_ms)

    @property
    def least_ms(self) -> float:
        """Return the least counter of the accounts that wait; where the last one was let in, if none does."""
        return min(map(self.of, self._num_waiting), default=self._floor_ms)

    @property
    def num_waiting(self) -> int:
        """Return of how many accounts requests wait. May be called in any thread, as `spread_ms`."""
        return len(self._num_waiting)

    @property
    def spread_ms(self) -> float:
        """Return by how much the counters of the accounts that wait differ at most."""
        used = [self.of(account) for account in list(self._num_waiting)]
        return max(used) - min(used) if used else 0.0

    def leave(self, account: str) -> None:
        """A request waits no more: it was let in, or its caller has left."""
        self._num_waiting[account] -= 1
        if not self._num_waiting[account]:
            del self._num_waiting[account]

    def let_in(self, account: str) -> None:
        """A request was let in."""
        self._floor_ms = self.of(account)

    def follow(self, leads: Mapping[str, float]) -> None:
        """Take over by how much each account is ahead of the one that is next anywhere.

        The one that is next of those that wait here keeps its counter: others, of which nothing is told, compare to it.
        """
        waiting = [account for account in leads if account in self._num_waiting]
        if not waiting:
            return
        reference = min(waiting, key=leads.__getitem__)
        base = self.of(reference) - leads[reference]
        for account, lead in leads.items():
            self._set(account, base + lead)

    def charge(self, account: str, device_ms: float) -> None:
        """Add what an account has used; a negative amount takes a charge back."""
        self._set(account, self.of(account) + device_ms)

    def knows(self, account: str) -> bool:
        return account in self._used_ms

    def scale(self, factor: float) -> None:
        """The unit of what was charged so far has changed."""
        self._floor_ms *= factor
        for account in self._used_ms:
            self._used_ms[account] *= factor

    def _set(self, account: str, used_ms: float) -> None:
        self._used_ms[account] = used_ms
        self._used_ms.move_to_end(account)
        if len(self._used_ms) > self._max_kept:
            for idle in self._used_ms:
                if idle not in self._num_waiting:
                    del self._used_ms[idle]
                    return


class AnswerMeter:
    """Charges for the tokens of one request's answers, beyond those that were charged for in advance."""

    def __init__(self, charge: Callable[[float], None], num_in_advance: float) -> None:
        """`charge` takes a number of tokens; a negative one takes a charge back."""
        self._charge = charge
        self._num_in_advance = num_in_advance

    def answered(self, num_tokens: float) -> None:
        num_paid = min(self._num_in_advance, num_tokens)
        self._num_in_advance -= num_paid
        if num_tokens > num_paid:
            self._charge(num_tokens - num_paid)

    def ended(self) -> None:
        """Give back what the answers were shorter than predicted; idempotent."""
        if self._num_in_advance:
            self._charge(-self._num_in_advance)
            self._num_in_advance = 0.0
