"""Remembers which workers the latest sessions were at, and how many came to each worker."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable

import msgspec

_MAX_SESSIONS = 10_000
_MAX_ARRIVALS = 1_024
"""Of sessions at workers: the latest are counted."""


class SessionRoute(msgspec.Struct, frozen=True, gc=False):
    """Incarnations; "" where there was no worker."""

    prefill: str
    decode: str


_NO_ROUTE = SessionRoute("", "")


class SessionAffinity:
    """The routes of the latest sessions; a bounded number."""

    def __init__(self, max_sessions: int = _MAX_SESSIONS, max_arrivals: int = _MAX_ARRIVALS) -> None:
        self._max_sessions, self._max_arrivals = max_sessions, max_arrivals
        self._routes: OrderedDict[str, SessionRoute] = OrderedDict()
        self._arrivals: deque[str] = deque()
        self._num_arrived: Counter[str] = Counter()
        self._listeners: list[Callable[[str], None]] = []

    def __len__(self) -> int:
        return len(self._routes)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with an incarnation after each change of `num_arrived`."""
        self._listeners.append(listener)

    def remember(self, session_id: str, route: SessionRoute) -> None:
        """Record the route of a session; "" is no session."""
        if not session_id:
            return
        last = self._routes.get(session_id, _NO_ROUTE)
        self._routes[session_id] = route
        self._routes.move_to_end(session_id)
        if len(self._routes) > self._max_sessions:
            self._routes.popitem(last=False)
        if route.decode != last.decode:
            self._arrived(route.decode)
        if route.prefill != last.prefill:
            self._arrived(route.prefill)

    def of(self, session_id: str) -> SessionRoute | None:
        return self._routes.get(session_id)

    def num_arrived(self, incarnation: str) -> int:
        """Return how many sessions came to a worker, new or from others, of the latest arrivals at any."""
        return self._num_arrived.get(incarnation, 0)

    def _arrived(self, incarnation: str) -> None:
        if not incarnation:
            return
        self._arrivals.append(incarnation)
        self._count(incarnation, 1)
        if len(self._arrivals) > self._max_arrivals:
            self._count(self._arrivals.popleft(), -1)

    def _count(self, incarnation: str, number: int) -> None:
        self._num_arrived[incarnation] += number
        if not self._num_arrived[incarnation]:
            del self._num_arrived[incarnation]
        for listener in self._listeners:
            listener(incarnation)
