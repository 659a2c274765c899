"""Remembers which workers the latest sessions were at."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

_MAX_SESSIONS = 10_000


class SessionRoute(msgspec.Struct, frozen=True, gc=False):
    """Incarnations; "" where there was no worker."""

    prefill: str
    decode: str


_NO_ROUTE = SessionRoute("", "")


class SessionAffinity:
    """The routes of the latest sessions; a bounded number."""

    def __init__(self, max_sessions: int = _MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._routes: OrderedDict[str, SessionRoute] = OrderedDict()
        self._listeners: list[Callable[[str, str], None]] = []

    def __len__(self) -> int:
        return len(self._routes)

    def listen(self, listener: Callable[[str, str], None]) -> None:
        """Call `listener` when a session comes to a worker: with its incarnation, and that of its last worker or ""."""
        self._listeners.append(listener)

    def remember(self, session_id: str, route: SessionRoute) -> None:
        """Record the route of a session; "" is no session.

        A session whose prompt a decode worker computes for once goes back to its prefill worker later.
        """
        if not session_id:
            return
        last = self._routes.get(session_id, _NO_ROUTE)
        if last.prefill and not route.prefill:
            route = SessionRoute(last.prefill, route.decode)
        self._routes[session_id] = route
        self._routes.move_to_end(session_id)
        if len(self._routes) > self._max_sessions:
            self._routes.popitem(last=False)
        for came, left in ((route.decode, last.decode), (route.prefill, last.prefill)):
            if came != left:
                for listener in self._listeners:
                    listener(came, left)

    def of(self, session_id: str) -> SessionRoute | None:
        return self._routes.get(session_id)
