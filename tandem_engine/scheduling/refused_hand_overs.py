"""Remembers hand-overs that were refused for lack of blocks, so that their class has a turn too.

A refused hand-over leaves nothing in the engine: its gateway offers it again after each load report of the worker, each
second or a little later, while it is the first that waits there. Each class remembers one: the first that was refused.
Once it has been offered for `AGEING_SECONDS`, the blocks that it lacks are kept free for it: until it is accepted, or
is not offered any more.

The choices of a request are one hand-over. A gateway offers them together, and takes all back if one is refused, so a
turn lasts until all are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.scheduling.waiting_queue import AGEING_NS

_OFFER_NS = 2_500_000_000
"""A hand-over that was not offered for so long waits no more, or elsewhere."""


@dataclass
class RefusedHandOver:
    """All choices of one request, which are offered together: under the same attempt, and again under the next one."""

    choice_of: str
    num_blocks_each: int
    """Of all groups, for one choice."""
    since_ns: int
    last_ns: int
    attempt: int
    """The latest offer."""
    offered: set[str]
    """Request ids of the choices in the latest offer so far."""
    num_accepted: int = 0
    """Of these."""
    num_choices: int = 1
    """The most choices that an offer had."""

    @property
    def num_missing(self) -> int:
        """The choices that are not accepted yet."""
        return self.num_choices - self.num_accepted

    def take_offer(self, request: Request, now_ns: int) -> None:
        """Count a choice: of the latest offer, or the first one of a new offer."""
        if request.attempt != self.attempt:
            self.attempt, self.num_accepted = request.attempt, 0
            self.offered.clear()
        self.last_ns = now_ns
        self.offered.add(request.request_id)
        self.num_choices = max(self.num_choices, len(self.offered))


class RefusedHandOvers:
    """Times are nanoseconds."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._first: dict[int, RefusedHandOver] = {}  # by class

    def offered(self, request: Request, now_ns: int) -> None:
        """Count an offer before it is accepted or refused."""
        self._drop_gone(now_ns)
        if (first := self._first_of(request)) is not None:
            first.take_offer(request, now_ns)

    def refused(self, request: Request, num_blocks: int, now_ns: int) -> None:
        if request.priority not in self._first:
            self._first[request.priority] = RefusedHandOver(
                request.choice_of, num_blocks, now_ns, now_ns, request.attempt, {request.request_id}
            )

    def accepted(self, request: Request) -> None:
        if (first := self._first_of(request)) is not None:
            first.num_accepted += 1
            if not first.num_missing:
                del self._first[request.priority]

    def due(self, now_ns: int) -> RefusedHandOver | None:
        """Return the hand-over that has been offered longest, if that is long enough for a turn."""
        self._drop_gone(now_ns)
        oldest = min(self._first.values(), key=lambda first: first.since_ns, default=None)
        return oldest if oldest is not None and now_ns - oldest.since_ns >= AGEING_NS else None

    def is_due(self, request: Request, now_ns: int) -> bool:
        """Whether it is this request that `due` returns."""
        return (due := self.due(now_ns)) is not None and due is self._first_of(request)

    def num_missing_blocks(self, due: RefusedHandOver) -> int:
        """Count the blocks for the choices not accepted yet, as far as the pool could ever hold them at once.

        Each accepted choice is one more that may grow into the next block.
        """
        num_with_growth = due.num_blocks_each + 1 + (self._config.num_window_groups or 0)
        most_choices = max(1, self._config.num_blocks // num_with_growth)
        return due.num_blocks_each + (min(due.num_missing, most_choices) - 1) * num_with_growth

    def _first_of(self, request: Request) -> RefusedHandOver | None:
        first = self._first.get(request.priority)
        return first if first is not None and first.choice_of == request.choice_of else None

    def _drop_gone(self, now_ns: int) -> None:
        for priority in [each for each, first in self._first.items() if now_ns - first.last_ns > _OFFER_NS]:
            del self._first[priority]
