"""Turns requests that have ended into events: what moved, what failed, and sums of what was refused."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from control_plane.explain.explanation import Explanation, Move

_WINDOW_SECONDS = 10.0
_MAX_SINGLE = 20
"""Moves of one window that are events of their own; the others are in a sum."""
_MAX_SUMS = 200
"""Different sums of one window."""
_REFUSALS = frozenset(
    {
        "ContextTooLong",
        "Draining",
        "InvalidRequest",
        "LimitReached",
        "ModelNotFound",
        "NotAllowed",
        "Overloaded",
        "Unauthenticated",
        "Unsupported",
    }
)
"""Errors that refuse a request before work. Other errors are failures."""
CROSSED = "stream_crossed_class"
_MOVES = {"migration": "request_migrated", "restart": "request_restarted"}


class RequestWatch:
    """Call `ended` for each request, and `flush` a few times a second."""

    def __init__(self, record: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        self._record = record
        self._clock = clock
        self._sums: Counter[tuple[str, str, str]] = Counter()
        """By kind, cause and model."""
        self._num_single = 0
        self._window_ends_at = 0.0

    def ended(self, explanation: Explanation) -> None:
        """Take in a request that has ended."""
        summary = explanation.summary
        if summary.state in ("failed", "aborted"):
            kind = "requests_refused" if summary.error in _REFUSALS else "request_failed"
            self._count(kind, summary.error, summary.model)
        for move in explanation.moves:
            if (moved := _MOVES.get(move.kind)) is not None:
                self._moved(moved, explanation, move, num_tokens=move.num_tokens)
                if move.seam is not None:  # not of a hand-over: where it crosses, it crosses in every request
                    self._moved(CROSSED, explanation, move, **move.seam.to_json())

    def flush(self, is_last: bool = False) -> None:
        """Record the sums once their window has ended, or at once for the last time."""
        if not self._sums or not (is_last or self._clock() >= self._window_ends_at):
            return
        sums, self._sums, self._num_single = self._sums, Counter(), 0
        for (kind, cause, model), count in sums.items():
            self._record(kind, cause=cause, model=model, count=count)

    def _moved(self, kind: str, explanation: Explanation, move: Move, **figures: Any) -> None:
        summary = explanation.summary
        self._num_single += 1
        if self._num_single > _MAX_SINGLE:
            self._count(kind, move.why, summary.model)
            return
        self._record(
            kind,
            cause=move.why,
            worker=move.from_worker,
            to=move.to_worker,
            model=summary.model,
            request_id=summary.id,
            **figures,
        )

    def _count(self, kind: str, cause: str, model: str) -> None:
        if not self._sums:
            self._window_ends_at = self._clock() + _WINDOW_SECONDS
        key = kind, cause, model
        if key in self._sums or len(self._sums) < _MAX_SUMS:
            self._sums[key] += 1
