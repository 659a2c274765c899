"""Knows how much room each worker has, so that a prompt is sent only where it is expected to be taken.

A worker that sends grants has said so. The room of others is estimated: what the last load report has free, minus what
this gateway has sent there since, plus what has ended since. The estimate is optimistic where nothing is known. Other
gateways send to the same workers, so a worker may still refuse. It then counts as full until one of this gateway's
calls there ends, or until its next report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from control_plane.admission.attachment import Attachment, GrantLeft
from control_plane.admission.token_times import TokenTimes

_QUEUED_SHARE = 8
"""A worker may queue an eighth as many requests as run there at once, so that a free seat is taken in the next step."""


@dataclass(frozen=True)
class Report:
    """What a worker's load report shows of its room."""

    num_free_tokens: int
    """Of blocks that no request uses, cached ones included."""
    num_total_tokens: int
    """0: the pool is not reported."""
    tokens_per_block: int
    num_live: int
    """Requests that run or wait."""
    max_running: int | None = None
    """Requests that run at once; None: not known."""
    num_running: int = 0
    num_steps: float = 0.0
    """Since its start, as the two below."""
    step_seconds: float = 0.0
    num_tokens_generated: float = 0.0


@dataclass(frozen=True)
class Work:
    """What a worker has done between two reports."""

    step_seconds: float
    num_tokens: float
    """Sampled."""


@dataclass(eq=False)
class _Room:
    report: Report
    num_tokens: int = 0
    """Sent since the report, less what has ended since."""
    num_requests: int = 0
    pending: set[SentCall] = field(default_factory=set)
    """Sent and not answered: the next report does not have them."""
    is_full: bool = False
    """It has refused, and nothing has changed since."""
    may_offer: bool = True
    """It has not refused since the last report: one request may be sent although it seems full.

    The reports of a pool that changes all the time are old. And a worker keeps blocks for a request only once it was
    offered.
    """
    num_ends: int = 0
    times: TokenTimes = field(default_factory=TokenTimes)


@dataclass(eq=False)
class SentCall:
    """One call to a worker, in the estimate of its room."""

    _rooms: WorkerRooms
    incarnation: str
    num_tokens: int
    _num_ends: int
    _is_over: bool = False
    grant: GrantLeft | None = None
    """What the worker's grant left before this call; None: its room was estimated."""

    def accepted(self) -> None:
        if (room := self._rooms.get(self.incarnation)) is not None:
            room.pending.discard(self)

    def refused(self) -> None:
        """The worker has no room; believed unless a call has ended there meanwhile."""
        room = self._rooms.get(self.incarnation)
        if room is not None and room.num_ends == self._num_ends:
            room.is_full, room.may_offer = True, False
        self._end(is_freed=False)

    def ended(self) -> None:
        """The call is over, and what it had is free; idempotent."""
        self._end(is_freed=True)

    def _end(self, *, is_freed: bool) -> None:
        room = self._rooms.get(self.incarnation)
        if self._is_over or room is None:
            return
        self._is_over = True
        room.pending.discard(self)
        room.num_tokens -= self.num_tokens
        room.num_requests -= 1
        if is_freed:
            room.num_ends += 1
            room.is_full = False


class WorkerRooms:
    """Rooms by incarnation."""

    def __init__(
        self,
        attachment: Callable[[str], Attachment | None] = lambda incarnation: None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`attachment` returns what was granted and sent on the stream to a worker. `clock`: monotonic seconds."""
        self._attachment = attachment
        self._clock = clock
        self._rooms: dict[str, _Room] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def get(self, incarnation: str) -> _Room | None:
        return self._rooms.get(incarnation)

    def reported(self, incarnation: str, report: Report) -> Work:
        """Take in a load report: it has all calls that the worker had answered. Return the work since the last one."""
        room = self._rooms.get(incarnation)
        if room is None:
            self._rooms[incarnation] = _Room(report)
            return Work(0.0, 0.0)
        last = room.report
        work = Work(report.step_seconds - last.step_seconds, report.num_tokens_generated - last.num_tokens_generated)
        num_running = (last.num_running + report.num_running) / 2
        room.times.add(num_running, report.num_steps - last.num_steps, work.step_seconds, work.num_tokens)
        room.report, room.is_full, room.may_offer = report, False, True
        room.num_tokens = sum(call.num_tokens for call in room.pending)
        room.num_requests = len(room.pending)
        return work

    def forget(self, incarnation: str) -> None:
        """The worker is gone."""
        self._rooms.pop(incarnation, None)

    def granted(self, incarnation: str) -> None:
        """A worker has granted anew: it knows what it has refused."""
        if (room := self._rooms.get(incarnation)) is not None:
            room.is_full = False

    def sent(self, incarnation: str, num_tokens: int) -> SentCall:
        """Count a call that needs `num_tokens` of a worker's pool."""
        room = self._rooms.get(incarnation)
        call = SentCall(self, incarnation, num_tokens, 0 if room is None else room.num_ends)
        if room is not None:
            room.num_tokens += num_tokens
            room.num_requests += 1
            room.pending.add(call)
        if (attachment := self._attachment(incarnation)) is not None:
            call.grant = attachment.sent(num_tokens, self._clock())
        return call

    def is_granted(self, incarnation: str, num_tokens: int) -> bool | None:
        """Return whether one request is within what a worker has granted; None: that does not say."""
        attachment = self._attachment(incarnation)
        return None if attachment is None else attachment.has_room(num_tokens, 1, self._clock())

    def has_room(
        self,
        incarnation: str,
        num_tokens: int,
        num_requests: int = 1,
        *,
        token_seconds: float | None = None,
        may_offer: bool = False,
        is_moving: bool = False,
    ) -> bool:
        """Return whether a worker is expected to take `num_requests` that need `num_tokens` of its pool together.

        `token_seconds`: the time that each token of its answers may take then; None: any. `may_offer`: also if its pool
        seems full, once between two reports. `is_moving`: an answer that has begun is not held up by grants.
        """
        room = self._rooms.get(incarnation)
        if room is None:
            return True
        if room.is_full:
            return False
        report = room.report
        num_live = report.num_live + room.num_requests
        is_slow = token_seconds is not None and not room.times.keeps(1000.0 * token_seconds, num_live + num_requests)
        attachment = None if is_moving else self._attachment(incarnation)
        granted = None if attachment is None else attachment.has_room(num_tokens, num_requests, self._clock())
        if granted is not None:
            return granted and (num_live <= 0 or not is_slow)
        if num_live <= 0:
            return True
        if report.max_running is not None:
            num_places = report.max_running + max(1, report.max_running // _QUEUED_SHARE)
            if num_live + num_requests > num_places:
                return False
        if is_slow:
            return False
        if not report.num_total_tokens:
            return True
        num_growing = num_live * report.tokens_per_block
        fits = report.num_free_tokens - room.num_tokens - num_growing >= num_tokens
        return fits or (may_offer and room.may_offer)
