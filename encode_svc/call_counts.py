"""Counts what one gateway has sent under a worker's grants, by calls and messages that come in any order.

Calls are numbered from 1, and each says the sum of tokens up to itself. So the call with the highest number tells of
all that were sent before it: those that have not come are on their way. A call that ended at the gateway without an
answer may never come; the gateway says so, and then it is not on its way, and is not served if it comes after all.

No clock, no loop, no message.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tandem_runtime.errors import InvalidRequest

_MAX_ON_WAY = 65_536
_MAX_ENDED = 1_024


class Amount(NamedTuple):
    num_calls: int
    num_tokens: int


class CallCounts:
    """Of one stream of grants."""

    def __init__(self) -> None:
        self._sent = Amount(0, 0)
        """As far as is known."""
        self._num_tokens_come = 0
        self._on_way: set[int] = set()
        self._ended: deque[int] = deque(maxlen=_MAX_ENDED)
        """Calls that were on their way when they ended, and do not come, or come too late."""

    @property
    def on_way(self) -> Amount:
        """Return what was sent and has not come."""
        return Amount(len(self._on_way), max(0, self._sent.num_tokens - self._num_tokens_come) if self._on_way else 0)

    def sent(self, num_calls: int, num_tokens: int) -> Amount:
        """The gateway has sent so much since its stream began; return what is new of that. Raise InvalidRequest."""
        new = Amount(num_calls - self._sent.num_calls, num_tokens - self._sent.num_tokens)
        if new.num_calls <= 0:
            return Amount(0, 0)
        if new.num_calls + len(self._on_way) > _MAX_ON_WAY or new.num_tokens < 0:
            raise InvalidRequest(
                f"the gateway has sent {num_calls:,} calls of {num_tokens:,} tokens on this stream, and before it said "
                f"{self._sent.num_calls:,} of {self._sent.num_tokens:,}; open a new stream"
            )
        self._on_way.update(range(self._sent.num_calls + 1, num_calls + 1))
        self._sent = Amount(num_calls, num_tokens)
        return new

    def came(self, number: int, num_tokens: int) -> bool:
        """A call has come, after `sent` with its number. Return False if it has ended at the gateway."""
        if number in self._on_way:
            self._arrive(number, num_tokens)
            return True
        return number not in self._ended

    def ended(self, number: int, num_tokens: int) -> None:
        """A call has ended at the gateway without an answer, after `sent` with its number or a later one."""
        if number in self._on_way:
            self._arrive(number, num_tokens)
            self._ended.append(number)

    def _arrive(self, number: int, num_tokens: int) -> None:
        self._on_way.discard(number)
        self._num_tokens_come += num_tokens
