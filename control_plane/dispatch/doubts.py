"""Decides whether to believe a worker's final error, the kind that every other worker would answer too.

A worker of another version, or with a wrong clock, may refuse what all others accept. So the first such answer is
doubted: the request goes to the next worker. It is believed once a second worker gives the same answer, or if there is
no second worker. If another worker does what the first refused, the answer counts against the first.
"""

from __future__ import annotations

from control_plane.dispatch.worker_call import WorkerCall
from control_plane.fleet.call_watch import CallWatch
from tandem_runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TandemError,
)

FINAL: tuple[type[TandemError], ...] = (InvalidRequest, DeadlineExceeded, Cancelled)
"""Errors that every other worker would answer too, if the worker is right."""
ASK_NEXT: tuple[type[TandemError], ...] = (FingerprintMismatch, ModelNotFound)
"""Refusals that concern one worker alone: it has another model or version than it had registered, or than its peers."""
_DOUBTED = "is_doubted"


def is_final(error: BaseException) -> bool:
    """Return whether no other worker need be asked."""
    return isinstance(error, FINAL) and not isinstance(error, ASK_NEXT) and not error.__dict__.get(_DOUBTED)


def is_doubted(error: BaseException) -> bool:
    """Return whether another worker may do what one refused with this error."""
    return bool(error.__dict__.get(_DOUBTED))


class Doubts:
    """The final errors that workers gave to one request."""

    def __init__(self) -> None:
        self.error: TandemError | None = None
        """The first one: the request's error if no worker takes it."""
        self._said_by: dict[int, set[str]] = {}
        self._watches: list[tuple[int, bool, CallWatch]] = []

    def heard(self, call: WorkerCall, error: TandemError, *, is_refusal: bool, is_past_deadline: bool) -> None:
        """Take in how a worker ended a call; mark a final error that is not believed.

        The gateway ends a request at its deadline itself: a worker that says so before has a wrong clock, and so
        has a second one. A worker that says that the request was cancelled was not told so by this gateway.
        `is_past_deadline`: by this gateway's clock. Then a worker that says so is right, and nobody else is asked.
        """
        if is_past_deadline and isinstance(error, DeadlineExceeded):
            return
        if not isinstance(error, (*FINAL, FingerprintMismatch)):
            if call.watch is not None and not isinstance(error, Overloaded):
                call.watch.failed(f"it answered {type(error).__name__}")
            return
        said_by = self._said_by.setdefault(error.code, set())
        said_by.add(call.incarnation)
        if len(said_by) > 1 and not isinstance(error, (DeadlineExceeded, Cancelled)):
            self._watches = [each for each in self._watches if each[0] != error.code]
            return
        error.__dict__[_DOUBTED] = True
        if not isinstance(error, ASK_NEXT):
            self.error = self.error or error
        if call.watch is not None:
            self._watches.append((error.code, is_refusal, call.watch))

    def refuted(self, *, is_finished: bool = False) -> None:
        """Other workers have accepted the request, or finished it: those that refused, or failed it, were wrong."""
        wrong = [each for each in self._watches if each[1] or is_finished]
        self._watches = [each for each in self._watches if each not in wrong]
        for _, _, watch in wrong:
            watch.failed("it refuses what other workers accept")
