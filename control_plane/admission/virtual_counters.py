"""Counts the device time that each account has used of one model, for a fair order of those that wait.

The next request is that of the account with the least counter. After "Fairness in Serving Large Language Models"
(Sheng et al., OSDI 2024, algorithm 2), with milliseconds of a device in place of tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

_MAX_KEPT = 10_000
"""Accounts whose counters are kept; of those without a waiting request, the least recently charged are dropped."""
_LEAST_PART = 0.02


class VirtualCounters:
    """Device milliseconds by account. What an account has used beyond its share it carries on, as debt."""

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._used_ms: OrderedDict[str, float] = OrderedDict()
        self._num_waiting: Counter[str] = Counter()
        self._parts: dict[str, float] = {}
        """Of accounts that wait, or have waited, at other gateways too."""
        self._floor_ms = 0.0
        """The counter of the account that was let in last: where accounts rejoin while nobody waits."""

    def __len__(self) -> int:
        return len(self._used_ms)

    def of(self, account: str) -> float:
        return self._used_ms.get(account, self._floor_ms)

    @property
    def num_waiting_accounts(self) -> int:
        return len(self._num_waiting)

    def arrive(self, account: str) -> None:
        """A request begins to wait. An idle account rejoins at the least counter of those that wait: it saves nothing.

        Call `leave` once the request waits no more.
        """
        if account not in self._num_waiting:
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

    def leave(self, account: str) -> None:
        """A request waits no more: it was let in, or its caller has left."""
        self._num_waiting[account] -= 1
        if not self._num_waiting[account]:
            del self._num_waiting[account]

    def let_in(self, account: str) -> None:
        """A request was let in."""
        self._floor_ms = self.of(account)

    def wait_elsewhere(self, parts: Mapping[str, float]) -> None:
        """Some accounts wait at other gateways too, and are served there: `parts` of what they wait for is here.

        An account with a third of its requests here is charged thrice, as if this gateway served all of them. Parts
        vary: by how much device time an account is before the others stays as it is. Else an account would pay for a
        request by the part of one moment, and get less the more its part varies. Others keep their parts.
        """
        least_ms = self.least_ms
        for account, part in parts.items():
            before, self._parts[account] = self.part_of(account), part
            ahead_ms = self.of(account) - least_ms
            if ahead_ms > 0 and account in self._used_ms:
                self._used_ms[account] = least_ms + ahead_ms * before / self.part_of(account)

    def wait_nowhere(self) -> None:
        """Nothing waits here: parts are told anew when something does."""
        self.wait_elsewhere(dict.fromkeys(self._parts, 1.0))
        self._parts.clear()

    def charge(self, account: str, device_ms: float) -> None:
        """Add what an account has used; a negative amount takes a charge back."""
        self._set(account, self.of(account) + device_ms / self.part_of(account))

    def part_of(self, account: str) -> float:
        """Return which part of what an account asks for it asks for here."""
        return max(_LEAST_PART, self._parts.get(account, 1.0))

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
                    self._parts.pop(idle, None)
                    return
