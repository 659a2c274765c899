"""Follows calls to workers, and keeps what they have shown of each worker's health."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from control_plane.fleet.registry import Worker

HealthState = Literal["ok", "detached", "ejected", "probation"]
Cause = Literal["failed", "slow"]
Outcome = Literal["ok", "failed", "slow"]

NUM_KEPT = 20
KEPT_SECONDS = 30.0


class Judge(Protocol):
    """Takes in what watched calls show; see `worker_health.py`."""

    def now(self) -> float:
        """Return monotonic seconds."""

    def answered(self, watch: CallWatch) -> None: ...

    def oldest_changed(self, record: Record) -> None:
        """Another call is the oldest that waits, or that one has begun."""

    def failed(self, watch: CallWatch, reason: str, cause: Cause, *, is_certain: bool) -> None: ...


@dataclass(frozen=True)
class Status:
    """How a worker stands with this gateway."""

    state: HealthState
    reason: str = ""


class Past(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one call."""

    at: float
    outcome: Outcome


@dataclass(eq=False, slots=True)
class Record:
    """What calls have shown of one incarnation."""

    worker: Worker
    outcomes: deque[Past] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))
    num_bad_in_a_row: int = 0
    num_good_in_a_row: int = 0
    last_good_at: float = -1.0
    last_bad_at: float = -1.0
    last_slow_at: float = -1.0
    """When the last outcome came that counts as slow."""
    last_output_at: float = -1.0
    waiting: dict[CallWatch, None] = field(default_factory=dict)
    """Calls without a first token, in the order that they were sent."""
    cause: Cause | None = None
    """Why the worker is out; None: it is not."""
    reason: str = ""
    ejected_at: float = 0.0
    ejected_until: float = 0.0
    ejection_seconds: float = 0.0
    reinstated_at: float = -1.0
    has_trial: bool = False

    def oldest(self) -> CallWatch | None:
        """Return the call that waits the longest."""
        return next(iter(self.waiting), None)

    @property
    def is_doubtful(self) -> bool:
        """Whether it has not answered yet, or not since its last bad outcome."""
        return self.last_good_at < 0 or self.last_bad_at >= self.last_good_at

    def share_bad(self, now: float) -> float:
        latest = [each.outcome for each in self.outcomes if now - each.at <= KEPT_SECONDS]
        return sum(outcome != "ok" for outcome in latest) / len(latest) if latest else 0.0


class CallWatch:
    """Follows one call for the worker's record: sent, accepted, first token; or how it failed."""

    __slots__ = (
        "_health",
        "accepted_at",
        "began_at",
        "has_failed",
        "is_over",
        "predicted_seconds",
        "record",
        "sent_at",
    )

    def __init__(self, health: Judge, record: Record, predicted_seconds: float | None, now: float) -> None:
        self._health = health
        self.record = record
        self.predicted_seconds = predicted_seconds
        self.sent_at = now
        self.accepted_at: float | None = None
        self.began_at: float | None = None if predicted_seconds is None else now
        """From when on the worker can work at the prompt; None: it waits for another worker."""
        self.is_over = self.has_failed = False

    def begin(self, predicted_seconds: float) -> None:
        """What the call waited for is there."""
        if self.began_at is None:
            self.predicted_seconds, self.began_at = predicted_seconds, self._health.now()
            if self.record.oldest() is self:
                self._health.oldest_changed(self.record)

    def accepted(self) -> None:
        if self.accepted_at is None:
            self.accepted_at = self._health.now()

    def output(self) -> None:
        """The first token has come."""
        if not self.is_over:
            self._health.answered(self)

    def failed(self, reason: str, cause: Cause = "failed", *, is_certain: bool = False) -> None:
        """The worker did not do what it had to. Also after the first token; counted once for each call.

        `is_certain`: this alone is enough to eject the worker.
        """
        self._health.failed(self, reason, cause, is_certain=is_certain)

    def closed(self) -> None:
        """Nobody waits for the call any more. It says nothing of the worker unless it was over before."""
        self.is_over = True
        record = self.record
        is_oldest = record.oldest() is self
        record.waiting.pop(self, None)
        if is_oldest:
            self._health.oldest_changed(record)
