"""Counts how many tokens each fairness key has been served.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2): each key's
counter grows by the tokens computed and sampled for it, and the lowest counter is next. A key that arrives or returns
starts no lower than the keys that are present, so no key gains an advantage by staying away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tandem_engine.scheduling.request import Request

_MAX_KEYS = 1024
_MAX_CLASSES = 64


class Shares:
    """Remembers the keys that arrived or were served last; far more than can be present at once."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, float] = OrderedDict()
        self._floor = 0.0  # counter of the key that had the last turn

    def served(self, key: str) -> float:
        """Return a key's counter, in tokens."""
        return self._served.get(key, self._floor)

    def arrive(self, key: str, others: Iterable[str]) -> None:
        """Add a key that was not present; `others` are the keys it competes with."""
        lowest = min(map(self.served, others), default=self._floor)
        self._set(key, max(self._served.get(key, 0.0), lowest))

    def choose(self, key: str) -> None:
        """Give this key the turn."""
        self._floor = max(self._floor, self.served(key))

    def charge(self, key: str, num_tokens: int) -> None:
        self._set(key, self.served(key) + num_tokens)

    def _set(self, key: str, served: float) -> None:
        self._served[key] = served
        self._served.move_to_end(key)
        if len(self._served) > _MAX_KEYS:
            self._served.popitem(last=False)


class ClassShares:
    """One `Shares` for each priority class; remembers the classes that were used last."""

    def __init__(self) -> None:
        self._shares: OrderedDict[int, Shares] = OrderedDict()

    @property
    def highest(self) -> int:
        """The highest class that is remembered; 0 if none is."""
        return max(self._shares, default=0)

    def of(self, priority: int) -> Shares:
        if priority not in self._shares:
            self._shares[priority] = Shares()
        self._shares.move_to_end(priority)
        if len(self._shares) > _MAX_CLASSES:
            self._shares.popitem(last=False)
        return self._shares[priority]

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count tokens that were computed or sampled for a request."""
        self.of(request.priority).charge(request.fairness_key, num_tokens)
