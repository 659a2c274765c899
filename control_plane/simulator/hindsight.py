"""Tells of each refused request when its turn would have come, had it alone been let wait.

It would have stood among the requests that did wait, by the same order. So its turn would have been that of the first
request that was let in after it came and that it goes before: it would have had that one's place.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from control_plane.admission.model_admission import ModelAdmission, Waiter


@dataclass(eq=False)
class Shadow:
    """A request that was refused; seconds."""

    account: str
    service_class: int
    came_at: float
    rejoins_at_ms: float
    """What its account's counter would have been at least, had it waited."""
    number: int | None = None
    """Of the request whose place it would have had; None: its turn would not have come in time."""
    at: float = math.inf
    """When its turn would have come."""


class Hindsight:
    """The refused requests of one model at one gateway."""

    def __init__(self, longest_seconds: float) -> None:
        """Whose turn would have come later than that after its arrival has none."""
        self._longest_seconds = longest_seconds
        self._pending: deque[Shadow] = deque()

    def refused(self, waiter: Waiter, room: ModelAdmission, now: float) -> Shadow:
        """Return what will tell of a request that is refused as it comes."""
        rejoins_at_ms = room.counters[waiter.service_class].rejoins_at(waiter.account)
        shadow = Shadow(waiter.account, waiter.service_class, now, rejoins_at_ms)
        self._pending.append(shadow)
        return shadow

    def let_in(self, waiter: Waiter, number: int, room: ModelAdmission, now: float) -> None:
        """A request goes to its worker: those that it would have been behind have had their turn.

        Call it before the request is charged for.
        """
        while self._pending and now - self._pending[0].came_at > self._longest_seconds:
            self._pending.popleft()
        theirs = _place(waiter.service_class, room.counters[waiter.service_class].of(waiter.account), waiter.came_at)
        left: deque[Shadow] = deque()
        for shadow in self._pending:
            used_ms = max(room.counters[shadow.service_class].of(shadow.account), shadow.rejoins_at_ms)
            if waiter.order is None:  # nobody waited whom it would not go before
                has_turn = not len(room) or shadow.service_class >= waiter.service_class
            else:
                has_turn = _place(shadow.service_class, used_ms, shadow.came_at) < theirs
            if has_turn:
                shadow.number, shadow.at = number, now
            else:
                left.append(shadow)
        self._pending = left


def _place(service_class: int, used_ms: float, came_at: float) -> tuple[int, float, float]:
    return -service_class, used_ms, came_at
