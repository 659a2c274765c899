"""Counts the device time that each account has used of one model, for a fair order of those that wait.

The next request is that of the account with the least counter. After "Fairness in Serving Large Language Models"
(Sheng et al., OSDI 2024, algorithm 2), with milliseconds of a device in place of tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

_MAX_KEPT = 10_000
"""Accounts whose counters are kept; of those without a waiting request, the least recently charged are dropped."""


class VirtualCounters:
    """Device milliseconds by account. What an account has used beyond its share it carries on, as debt."""

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._used_ms: OrderedDict[str, float] = OrderedDict()
        self._num_waiting: Counter[str] = Counter()
        self._waiting: dict[int, Counter[str]] = {}
        """The same by class."""
        self._floor_ms = 0.0
        """The counter of the account that was let in last."""
        self._floors: dict[int, float] = {}
        """By class: where accounts rejoin while nobody of the class waits."""

    def __len__(self) -> int:
        return len(self._used_ms)

    def of(self, account: str) -> float:
        return self._used_ms.get(account, self._floor_ms)

    def __contains__(self, account: str) -> bool:
        """Return whether requests of an account wait."""
        return account in self._num_waiting

    def arrive(self, account: str, service_class: int = 0, *, is_back: bool = False) -> None:
        """A request begins to wait. An idle account rejoins at the least counter of its class: it saves nothing.

        What waits in another class is no measure: a batch may not be served for hours. Call `leave` once the request
        waits no more. `is_back`: it has waited before, and was not idle.
        """
        of_class = self._waiting.setdefault(service_class, Counter())
        if account not in of_class and not is_back:
            self._set(account, self.rejoins_at(account, service_class))
        of_class[account] += 1
        self._num_waiting[account] += 1

    def rejoins_at(self, account: str, service_class: int = 0) -> float:
        """Return the counter of an account whose request would begin to wait now."""
        if account in self._waiting.get(service_class, ()):
            return self.of(account)
        least_ms = self.least_ms(service_class)
        return max(self._used_ms.get(account, least_ms), least_ms)

    def least_ms(self, service_class: int = 0) -> float:
        """Return the least counter of the accounts that wait in a class; if none does, that of the last let in."""
        waiting = self._waiting.get(service_class)
        if waiting:
            return min(map(self.of, waiting))
        return self._floors.get(service_class, self._floor_ms)

    def leave(self, account: str, service_class: int = 0) -> None:
        """A request waits no more: it was let in, or its caller has left."""
        of_class = self._waiting[service_class]
        for counter in (self._num_waiting, of_class):
            counter[account] -= 1
            if not counter[account]:
                del counter[account]
        if not of_class:
            del self._waiting[service_class]

    def let_in(self, account: str, service_class: int = 0) -> None:
        """A request was let in."""
        self._floor_ms = self._floors[service_class] = self.of(account)

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
        for service_class in self._floors:
            self._floors[service_class] *= factor
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
