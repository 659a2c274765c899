"""Learns what hand-overs between two hosts take as a line: fixed milliseconds, and milliseconds for each byte.

Weighted least squares over the last few hand-overs, drawn towards what is assumed. Each counts by the square of the
share that its fixed part has of all that was predicted for it: the errors of long ones are larger, and should not
decide what short ones take. Short ones say little of bytes: then the assumed milliseconds per byte hold.
"""

from __future__ import annotations

from typing import NamedTuple

_OLD_WEIGHT = 0.8
"""Of the hand-overs before each one, which together count as five."""
_NUM_COUNTED = 1 / (1 - _OLD_WEIGHT)
_LEAST_WEIGHT = 0.05
_LEAST_ASSUMED = 0.01, 0.25
"""Once five hand-overs are known, what is assumed counts as so many: for the fixed part, and for each byte."""
_MOST_TIMES = 8.0
"""A byte takes at most so many times as long as assumed, and at least such a part of it. A hand-over that took more
times as long as predicted counts as one that took so many times as long."""
_NEVER_LONG_MS = 100.0
"""What was predicted to take less counts as this: of a short hand-over, a multiple is no surprise."""


class PairLine(NamedTuple):
    """Sums over hand-overs, older ones with less weight."""

    number: float = 0.0
    weight: float = 0.0
    num_bytes: float = 0.0
    ms: float = 0.0
    bytes_squared: float = 0.0
    ms_bytes: float = 0.0

    def faded(self, share: float) -> PairLine:
        """Return the sums with a share of their weight: what was learnt long ago counts less."""
        return PairLine(*[share * each for each in self])

    def plus(self, num_bytes: float, ms: float, fixed_ms: float, ms_per_byte: float) -> PairLine:
        """Return the sums with one more hand-over; `fixed_ms` and `ms_per_byte` are those that were predicted."""
        predicted_ms = fixed_ms + ms_per_byte * num_bytes
        weight = max(_LEAST_WEIGHT, (fixed_ms / predicted_ms) ** 2) if predicted_ms > 0 else 1.0
        ms = min(ms, _MOST_TIMES * max(predicted_ms, _NEVER_LONG_MS))
        new = 1.0, weight, weight * num_bytes, weight * ms, weight * num_bytes**2, weight * num_bytes * ms
        return PairLine(*[_OLD_WEIGHT * old + each for old, each in zip(self, new, strict=True)])

    def solved(self, assumed_ms: float, assumed_ms_per_byte: float) -> tuple[float, float]:
        """Return the fixed milliseconds and those per byte, for a pair of which these are assumed."""
        num_assumed = max(0.0, _NUM_COUNTED - self.number)
        of_fixed = max(_LEAST_ASSUMED[0], num_assumed)
        of_bytes = (num_assumed + _LEAST_ASSUMED[1]) * (assumed_ms / assumed_ms_per_byte) ** 2
        more_ms = self.ms - assumed_ms * self.weight - assumed_ms_per_byte * self.num_bytes
        more_ms_bytes = self.ms_bytes - assumed_ms * self.num_bytes - assumed_ms_per_byte * self.bytes_squared
        fixed, squared = self.weight + of_fixed, self.bytes_squared + of_bytes
        more = (fixed * more_ms_bytes - self.num_bytes * more_ms) / (fixed * squared - self.num_bytes**2)
        least, most = assumed_ms_per_byte / _MOST_TIMES, assumed_ms_per_byte * _MOST_TIMES
        ms_per_byte = min(most, max(least, assumed_ms_per_byte + more))
        rest = more_ms - (ms_per_byte - assumed_ms_per_byte) * self.num_bytes
        return max(0.0, assumed_ms + rest / fixed), ms_per_byte
