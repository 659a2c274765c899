"""Remembers which workers the latest sessions were at."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

_MAX_SESSIONS = 10_000


class SessionRoute(msgspec.Struct, frozen=True, gc=False):
    """Incarnations; "" where there was no worker."""

    prefill: str
    decode: str


class SessionAffinity:
    """The routes of the latest sessions; a bounded number."""

    def __init__(self, max_sessions: int = _MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._routes: OrderedDict[str, SessionRoute] = OrderedDict()

    def __len__(self) -> int:
        return len(self._routes)

    def remember(self, session_id: str, route: SessionRoute) -> None:
        """Record the route of a session; "" is no session."""
        if not session_id:
            return
        self._routes[session_id] = route
        self._routes.move_to_end(session_id)
        if len(self._routes) > self._max_sessions:
            self._routes.popitem(last=False)

    def of(self, session_id: str) -> SessionRoute | None:
        return self._routes.get(session_id)
