"""Who has been served how much?

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2): each key's
counter goes up by the tokens computed and sampled for it, and whoever has the lowest is next. A key that comes, or
comes back, starts no lower than those that are here: nobody saves up by staying away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

_MAX_KEYS = 1024


class Shares:
    """Only the keys that came, or were served, last are remembered; far more than can be here at once."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, float] = OrderedDict()
        self._floor = 0.0  # what the key whose turn came last had been served

    def served(self, key: str) -> float:
        """Return a key's counter, in tokens."""
        return self._served.get(key, self._floor)

    def arrive(self, key: str, others: Iterable[str]) -> None:
        """A key that was not here is now; `others` are those it competes with."""
        lowest = min(map(self.served, others), default=self._floor)
        self._set(key, max(self._served.get(key, 0.0), lowest))

    def choose(self, key: str) -> None:
        """It is this key's turn."""
        self._floor = max(self._floor, self.served(key))

    def charge(self, key: str, num_tokens: int) -> None:
        self._set(key, self.served(key) + num_tokens)

    def _set(self, key: str, served: float) -> None:
        self._served[key] = served
        self._served.move_to_end(key)
        if len(self._served) > _MAX_KEYS:
            self._served.popitem(last=False)
