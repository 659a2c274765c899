"""How good is a link? Moving averages over what really went through it."""

from __future__ import annotations

from dataclasses import dataclass

_RATE_BYTES = 256 << 10
"""Smaller transfers say more about latency than about bytes per second, and count for that alone."""
_FULL_WEIGHT_BYTES = 16 << 20
_MAX_WEIGHT = 0.5
_LATENCY_WEIGHT = 0.2
_SLOW_SHARE = 0.25


@dataclass
class LinkFigures:
    """Of one link and the transport it uses now; `reset_rate` when that becomes another."""

    bytes_per_second: float = 0.0
    best_bytes_per_second: float = 0.0
    latency_seconds: float = 0.0
    num_transfers: int = 0
    num_bytes: int = 0
    num_errors: int = 0
    num_fallbacks: int = 0

    def transferred(self, num_bytes: int, seconds: float) -> None:
        self.num_transfers += 1
        self.num_bytes += num_bytes
        self.measured(num_bytes, seconds)

    def measured(self, num_bytes: int, seconds: float) -> None:
        """Take one duration into account; a larger transfer counts for more."""
        if num_bytes < _RATE_BYTES:
            before = self.latency_seconds or seconds
            self.latency_seconds = before + _LATENCY_WEIGHT * (seconds - before)
            return
        rate = num_bytes / max(seconds, 1e-9)
        weight = min(_MAX_WEIGHT, num_bytes / _FULL_WEIGHT_BYTES) if self.bytes_per_second else 1.0
        self.bytes_per_second += weight * (rate - self.bytes_per_second)
        self.best_bytes_per_second = max(self.best_bytes_per_second, self.bytes_per_second)

    def reset_rate(self) -> None:
        """What is measured from now on is another way."""
        self.bytes_per_second = self.best_bytes_per_second = self.latency_seconds = 0.0

    @property
    def slowness(self) -> str:
        """Say how slow the link is, or "" if it is not."""
        if self.bytes_per_second >= _SLOW_SHARE * self.best_bytes_per_second:
            return ""
        return f"slow: {self.bytes_per_second / self.best_bytes_per_second:.0%} of its best"
