"""Which workers served a session last? Its prompt's beginning may still be in their caches."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_MAX_SESSIONS = 10_000


@dataclass(frozen=True)
class Served:
    """Incarnations; "" where there was none."""

    prefill: str
    decode: str


class SessionAffinity:
    """Remembers the workers of the sessions seen last, a bounded number of them."""

    def __init__(self, max_sessions: int = _MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._served: OrderedDict[str, Served] = OrderedDict()

    def __len__(self) -> int:
        return len(self._served)

    def remember(self, session_id: str, served: Served) -> None:
        """Note who served a session; "" is no session."""
        if not session_id:
            return
        self._served[session_id] = served
        self._served.move_to_end(session_id)
        if len(self._served) > self._max_sessions:
            self._served.popitem(last=False)

    def of(self, session_id: str) -> Served | None:
        return self._served.get(session_id)
