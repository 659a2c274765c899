"""Limits the time that copies of KV blocks take from one step, so that no answer waits long for its next token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tandem_engine.messages import ExtentRef

COPY_NS = 10_000_000
"""Of all imports and loads between two steps; a piece that has begun is copied to its end."""
_PIECE_BYTES = 4 << 20
"""One piece takes 1 to 4 ms."""


class CopyBudget:
    """Counts the time of copies and commands since `renew`; `clock` returns nanoseconds.

    Commands spend the budget too, but never wait for it: a copy does, after a long prompt that took time to arrive.
    """

    def __init__(self, clock: Callable[[], int], cpu_clock: Callable[[], int] = time.thread_time_ns) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._spent_ns = self._copies_ns = self._copies_cpu_ns = self._commands_ns = 0
        self.longest_copies_ns = 0
        """Most that was spent on copies for one step."""
        self.longest_copies_cpu_ns = 0
        """The same in processor time of the engine's thread: without waits for a core that others use, too."""
        self.longest_commands_ns = 0
        """Most that was spent on commands between two steps, copies of imports included."""

    @property
    def has_left(self) -> bool:
        return self._spent_ns < COPY_NS

    def renew(self) -> None:
        self._spent_ns = self._copies_ns = self._copies_cpu_ns = self._commands_ns = 0

    def timed(self, copy: Callable[[], int]) -> int:
        """Copy, count the time, and return what `copy` returns."""
        started, cpu_started = self._clock(), self._cpu_clock()
        try:
            return copy()
        finally:
            elapsed = self._clock() - started
            self._spent_ns += elapsed
            self._copies_ns += elapsed
            self._copies_cpu_ns += self._cpu_clock() - cpu_started
            self.longest_copies_ns = max(self.longest_copies_ns, self._copies_ns)
            self.longest_copies_cpu_ns = max(self.longest_copies_cpu_ns, self._copies_cpu_ns)

    @contextmanager
    def command(self) -> Iterator[None]:
        """Count the time of a command; copies within it count once."""
        started, spent = self._clock(), self._spent_ns
        try:
            yield
        finally:
            elapsed = self._clock() - started
            self._spent_ns = spent + elapsed
            self._commands_ns += elapsed
            self.longest_commands_ns = max(self.longest_commands_ns, self._commands_ns)


def pieces(extents: Sequence[ExtentRef]) -> Iterator[slice]:
    """Yield ranges of extents of 4 MiB each, or of one extent that is larger."""
    start = num_bytes = 0
    for index, extent in enumerate(extents):
        if index > start and num_bytes + extent.num_bytes > _PIECE_BYTES:
            yield slice(start, index)
            start, num_bytes = index, 0
        num_bytes += extent.num_bytes
    if start < len(extents):
        yield slice(start, len(extents))
