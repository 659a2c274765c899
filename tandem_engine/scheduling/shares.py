"""Counts how many tokens each fairness key has been served.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2): each key's
counter grows by the tokens computed and sampled for it, and the lowest counter is next. A key that arrives or returns
starts no lower than the keys that are present, so no key gains an advantage by staying away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

_MAX_KEYS = 1024


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
