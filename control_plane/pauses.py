"""Remembers what has failed, and until when it is not tried again: twice as long after each failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tandem_runtime.errors import TandemError

K = TypeVar("K")

_MAX_FAILURES = 1024


@dataclass(frozen=True)
class _Failure:
    error: TandemError
    pause_seconds: float
    until: float


class Pauses(Generic[K]):
    """The last failure of each key; a bounded number of keys. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._failures: dict[K, _Failure] = {}

    def raise_if_paused(self, key: K) -> None:
        """Raise the error of the last failure while the key is not to be tried."""
        failure = self._failures.get(key)
        if failure is not None and self.clock() < failure.until:
            raise failure.error.with_traceback(None)

    def failed(self, key: K, error: TandemError, first_seconds: float, max_seconds: float) -> None:
        """Note a failure: the pause is `first_seconds`, then twice the one before, up to `max_seconds`."""
        before = self._failures.pop(key, None)
        pause = first_seconds if before is None else min(max(first_seconds, 2 * before.pause_seconds), max_seconds)
        self._failures[key] = _Failure(error, pause, self.clock() + pause)
        while len(self._failures) > _MAX_FAILURES:
            del self._failures[next(iter(self._failures))]

    def last(self, key: K) -> TandemError | None:
        """Return the error of the last failure, unless it was forgotten."""
        failure = self._failures.get(key)
        return None if failure is None else failure.error

    def forget(self, key: K) -> None:
        """The key is tried at once."""
        self._failures.pop(key, None)
