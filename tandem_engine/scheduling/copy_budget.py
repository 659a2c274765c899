"""Limits the time that copies of KV blocks take from one step, so that no answer waits long for its next token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tandem_engine.messages import ExtentRef

COPY_NS = 10_000_000
"""Of all imports and loads between two steps; a piece that has begun is copied to its end."""
_PIECE_BYTES = 4 << 20
"""One piece takes 1 to 4 ms."""


class CopyBudget:
    """Counts the time of copies since `renew`; `clock` returns nanoseconds."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._spent_ns = 0
        self.longest_ns = 0
        """Most that was spent on copies for one step."""

    @property
    def has_left(self) -> bool:
        return self._spent_ns < COPY_NS

    def renew(self) -> None:
        self._spent_ns = 0

    def timed(self, copy: Callable[[], int]) -> int:
        """Copy, count the time, and return what `copy` returns."""
        started = self._clock()
        try:
            return copy()
        finally:
            self._spent_ns += self._clock() - started
            self.longest_ns = max(self.longest_ns, self._spent_ns)


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
