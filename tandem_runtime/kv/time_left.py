"""The time until the deadline of a KV handle.

Deadlines travel as time left, which needs no two clocks to agree. Beside it travels the time of day of release 0.2,
which a message without the time left is judged by. The handle's signature covers the time of day only: a member of the
fleet is believed about the time left, up to a day.
"""

from __future__ import annotations

import time
from typing import Protocol

from tandem.v1 import types_pb2 as pb


class _Timed(Protocol):
    """A message with `optional int64 time_left_ms`."""

    @property
    def time_left_ms(self) -> int: ...

    def HasField(self, name: str) -> bool: ...


def seconds_left_by_wall_clock(handle: pb.KvHandle) -> float:
    """Return the seconds until the handle's deadline, right if this machine's clock agrees with the gateway's."""
    return handle.deadline_unix_ms / 1000 - time.time()


def stated_seconds_left(message: object) -> float | None:
    """Return the seconds that a message states; None if its sender is of release 0.2."""
    timed: _Timed = message  # type: ignore[assignment] # generated classes share no type for this field
    return timed.time_left_ms / 1000 if timed.HasField("time_left_ms") else None


def milliseconds(seconds_left: float | None) -> int | None:
    """Return the field `time_left_ms`; None leaves it out."""
    return None if seconds_left is None else max(0, int(seconds_left * 1000))
