"""An account's limits, and the sliding window that counts what it has used in the last minute.

Admitted requests count for a minute, in ticks of half a second. So no period of 60 seconds has more than the limit.
These are pure values; control_plane.accounts.limiter stores the window in the database.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import msgspec

from tandem_runtime.errors import InvalidRequest

_TICKS_PER_SECOND = 2
_MINUTE_TICKS = 60 * _TICKS_PER_SECOND
_SKEW_TICKS = 10
_LONGEST_WAIT_SECONDS = 60.0
_CONCURRENCY_RETRY_SECONDS = 1.0
"""Retry-After at the limit of concurrent requests: the end of a running request is unknown."""


@dataclass(frozen=True)
class Limits:
    """The limits of an account; None for no limit."""

    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 1 <= value < 2**31:
                raise InvalidRequest(
                    f"{field.name} is {value:,}, must be from 1 to {2**31 - 1:,}; null for no limit", field=field.name
                )


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Refusal:
    what: Literal["requests", "tokens", "concurrency"]
    limit: int
    retry_after_seconds: float


@dataclass(frozen=True)
class RateLimitStatus:
    """A limit as response headers report it; after `reset_seconds` all of the limit is free again."""

    limit: int
    remaining: int
    reset_seconds: float


class Window(msgspec.Struct, frozen=True):
    """The requests and tokens of the last minute, and the running requests, of one account.

    `used` has (tick, requests, tokens) in ascending order; ticks are half seconds since 1970. `running` counts running
    requests by gateway incarnation, so that those of a lost gateway can be removed.
    """

    used: tuple[tuple[int, int, int], ...] = ()
    running: dict[str, int] = {}

    @classmethod
    def decode(cls, text: str) -> Window:
        return msgspec.json.decode(text, type=cls)

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def num_requests(self) -> int:
        return sum(requests for _, requests, _ in self.used)

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, _, tokens in self.used)

    def tick(self, now: float) -> int:
        """Return the tick of `now` (Unix seconds), never before the last counted tick: clocks differ a little."""
        tick = math.floor(now * _TICKS_PER_SECOND)
        return max(tick, min(self.used[-1][0], tick + _SKEW_TICKS)) if self.used else tick

    def at(self, tick: int) -> Window:
        """Return the window without ticks whose last moment is more than a minute ago.

        Ticks in the future are removed, too: a clock that was wrong for a moment must not block an account for hours.
        """
        first, last = tick - _MINUTE_TICKS, tick + _SKEW_TICKS
        return self._with(tuple(entry for entry in self.used if first <= entry[0] <= last))

    def admit(self, limits: Limits, num_tokens: int, gateway: str, now: float) -> tuple[Window, Refusal | None]:
        """Count one more request with an estimate of its tokens, or return the refusal."""
        tick = self.tick(now)
        window = self.at(tick)
        if (refusal := window._refusal(limits, num_tokens, now)) is not None:
            return window, refusal
        running = dict(window.running)
        if limits.max_concurrent_requests is not None:
            running[gateway] = running.get(gateway, 0) + 1
        return Window(_added(window.used, tick, 1, num_tokens), running), None

    def settle(self, tick: int, num_extra_tokens: int, gateway: str, *, was_running: bool, now: float) -> Window:
        """Correct the estimate of a request that was admitted at `tick`, and count the request as ended."""
        window = self.at(self.tick(now))
        running = dict(window.running)
        if was_running:
            running[gateway] = running.get(gateway, 0) - 1
            if running[gateway] <= 0:
                del running[gateway]
        if num_extra_tokens > 0:
            return Window(_added(window.used, self.tick(now), 0, num_extra_tokens), running)
        used = tuple(
            (when, requests, max(0, tokens + num_extra_tokens) if when == tick else tokens)
            for when, requests, tokens in window.used
        )
        return Window(used, running)

    def with_running(self, gateway: str, num_running: int) -> Window:
        """Return the window with `num_running` requests of a gateway."""
        others = {name: count for name, count in self.running.items() if name != gateway}
        return Window(self.used, {**others, gateway: num_running} if num_running > 0 else others)

    def requests(self, limits: Limits, now: float) -> RateLimitStatus | None:
        """Return the status of the limit; None if there is no such limit."""
        return self._status(limits.max_requests_per_minute, self.num_requests, now)

    def tokens(self, limits: Limits, now: float) -> RateLimitStatus | None:
        return self._status(limits.max_tokens_per_minute, self.num_tokens, now)

    def _refusal(self, limits: Limits, num_tokens: int, now: float) -> Refusal | None:
        most = limits.max_requests_per_minute
        if most is not None and self.num_requests >= most:
            return Refusal("requests", most, self._wait([entry[1] for entry in self.used], most - 1, now))
        most = limits.max_tokens_per_minute
        if most is not None and self.num_tokens + num_tokens > most:
            return Refusal("tokens", most, self._wait([entry[2] for entry in self.used], most - num_tokens, now))
        most = limits.max_concurrent_requests
        if most is not None and sum(self.running.values()) >= most:
            return Refusal("concurrency", most, _CONCURRENCY_RETRY_SECONDS)
        return None

    def _wait(self, counts: list[int], most: int, now: float) -> float:
        """Return the seconds until at most `most` are counted."""
        left = sum(counts)
        for (tick, _, _), count in zip(self.used, counts, strict=True):
            left -= count
            if left <= most:
                return max(1 / _TICKS_PER_SECOND, _end(tick) - now)
        return _LONGEST_WAIT_SECONDS

    def _status(self, most: int | None, num_used: int, now: float) -> RateLimitStatus | None:
        if most is None:
            return None
        reset = max(0.0, _end(self.used[-1][0]) - now) if self.used else 0.0
        return RateLimitStatus(most, max(0, most - num_used), reset)

    def _with(self, used: tuple[tuple[int, int, int], ...]) -> Window:
        return self if used == self.used else Window(used, self.running)


def _added(
    used: tuple[tuple[int, int, int], ...], tick: int, num_requests: int, num_tokens: int
) -> tuple[tuple[int, int, int], ...]:
    if used and used[-1][0] == tick:
        _, requests, tokens = used[-1]
        return (*used[:-1], (tick, requests + num_requests, tokens + num_tokens))
    return (*used, (tick, num_requests, num_tokens))


def _end(tick: int) -> float:
    """Return when a tick stops counting, in Unix seconds."""
    return (tick + _MINUTE_TICKS + 1) / _TICKS_PER_SECOND
