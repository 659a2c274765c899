"""Remembers hand-overs that were refused for lack of blocks, so that their class has a turn too.

A refused hand-over leaves nothing in the engine: its gateway offers it again, at least four times a second while it is
the first that waits there. Each class remembers one: the first that was refused. Once it has been offered for
`AGEING_SECONDS`, the blocks that it lacks are kept free for it: until it is accepted, or is not offered any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.waiting_queue import AGEING_NS

_OFFER_NS = 1_000_000_000
"""A hand-over that was not offered for so long waits no more, or elsewhere."""


@dataclass
class RefusedHandOver:
    """A hand-over that is offered again under another request id: class, key and length identify it."""

    fairness_key: str
    num_tokens: int
    num_blocks: int
    """Of all groups."""
    since_ns: int
    last_ns: int

    def is_of(self, request: Request) -> bool:
        return (self.fairness_key, self.num_tokens) == (request.fairness_key, request.num_tokens)


class RefusedHandOvers:
    """Times are nanoseconds."""

    def __init__(self) -> None:
        self._first: dict[int, RefusedHandOver] = {}  # by class

    def refused(self, request: Request, num_blocks: int, now_ns: int) -> None:
        self._drop_gone(now_ns)
        first = self._first.get(request.priority)
        if first is None:
            key, num_tokens = request.fairness_key, request.num_tokens
            self._first[request.priority] = RefusedHandOver(key, num_tokens, num_blocks, now_ns, now_ns)
        elif first.is_of(request):
            first.last_ns = now_ns

    def accepted(self, request: Request) -> None:
        first = self._first.get(request.priority)
        if first is not None and first.is_of(request):
            del self._first[request.priority]

    def due(self, now_ns: int) -> RefusedHandOver | None:
        """Return the hand-over that has been offered longest, if that is long enough for a turn."""
        self._drop_gone(now_ns)
        oldest = min(self._first.values(), key=lambda first: first.since_ns, default=None)
        return oldest if oldest is not None and now_ns - oldest.since_ns >= AGEING_NS else None

    def is_due(self, request: Request, now_ns: int) -> bool:
        """Whether it is this request that `due` returns."""
        return (due := self.due(now_ns)) is not None and due is self._first.get(request.priority) and due.is_of(request)

    def _drop_gone(self, now_ns: int) -> None:
        for priority in [each for each, first in self._first.items() if now_ns - first.last_ns > _OFFER_NS]:
            del self._first[priority]
