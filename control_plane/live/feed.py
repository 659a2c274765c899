"""Makes the live page's stream: one producer for all readers, and almost no work while nobody reads.

event      data                                                    when
hello      gateway, version, event_kinds                           first
fleet      full, workers, gone, hosts, hosts_gone, models, rates   each second in which something changed
requests   data: rows of GET /v1/requests                          each second in which something changed
cache      tiers, history                                          every five seconds; at first the whole last hour
event      one event of the fleet                                  as it happens
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from control_plane.live.cache_history import SAMPLE_SECONDS, CacheHistory
from control_plane.live.fleet_rows import Changes, FleetRows
from control_plane.live.viewers import Viewer, Viewers

_TURN_SECONDS = 1.0
MAX_REQUESTS = 100
"""Rows of the list of requests: running ones first, then the newest."""

_encode = msgspec.json.Encoder().encode


class RequestList(Protocol):
    """The requests of this gateway, as the page lists them."""

    def newest(self, limit: int) -> list[dict[str, Any]]:
        """Return up to `limit` rows, running ones first, then the newest."""

    def num_ended(self) -> int:
        """Return how many requests have ended since this process started."""


class EventSource(Protocol):
    """What the fleet decided, as it happens."""

    def subscribe(self) -> AsyncIterator[dict[str, Any]]:
        """Yield each new event as plain values."""


class NoRequests:
    """Of a gateway that keeps no list of requests."""

    def newest(self, limit: int) -> list[dict[str, Any]]:
        return []

    def num_ended(self) -> int:
        return 0


@dataclass
class _Rates:
    """Requests per second between two looks."""

    num_ended: int = 0
    at: float = 0.0
    requests_per_second: float = 0.0

    def look(self, num_ended: int, now: float) -> None:
        if self.at and now > self.at:
            self.requests_per_second = max(0, num_ended - self.num_ended) / (now - self.at)
        self.num_ended, self.at = num_ended, now


@dataclass
class _Frames:
    """The last frame of each kind that is sent when it changes."""

    requests: bytes = b""
    extras: tuple[Any, ...] = field(default=())


class LiveFeed:
    """Owns the readers of `GET /v1/live`. `run` and `run_events` are the producer; `close` ends all streams."""

    def __init__(
        self,
        fleet: FleetRows,
        cache: CacheHistory,
        *,
        gateway: str = "",
        models: Callable[[], Sequence[str]] = tuple,
        requests: RequestList | None = None,
        events: EventSource | None = None,
        event_kinds: Sequence[str] = (),
        turn_seconds: float = _TURN_SECONDS,
    ) -> None:
        """`models` returns the ids of the models that are served; `gateway` is this gateway's incarnation."""
        self._fleet = fleet
        self._cache = cache
        self._models = models
        self._requests = requests or NoRequests()
        self._events = events
        self.turn_seconds = turn_seconds
        """Between two looks at the fleet and the requests, while somebody reads."""
        self._rates = _Rates()
        self._last = _Frames()
        self._is_looked_at = False
        """Whether rows are current: without readers, nobody looks at the fleet."""
        self._wakes = asyncio.Event()
        self._hello = _frame(
            "hello",
            {
                "gateway": gateway,
                "version": importlib.metadata.version("tandem-serve"),
                "event_kinds": list(event_kinds),
            },
        )
        self._viewers = Viewers(self._beginning)

    def join(self) -> Viewer:
        """Return a new reader; raise TooManyViewers."""
        viewer = self._viewers.join()
        if not self._is_looked_at:
            self._wakes.set()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.leave(viewer)

    def close(self) -> None:
        """End all streams: the gateway drains."""
        self._viewers.end()

    async def run(self) -> None:
        """Look at the fleet each second while somebody reads, and sample the cache every five seconds, for ever."""
        clock = asyncio.get_running_loop().time
        sample_at = clock()
        while True:
            if clock() >= sample_at:
                sample_at = clock() + SAMPLE_SECONDS
                await self._cache.sample()
                self._viewers.send(self._cache_frame(whole=False))
            if self._viewers:
                await self._look()
            else:
                self._is_looked_at = False
            self._wakes.clear()
            await self._pause()

    async def run_events(self) -> None:
        """Pass events on as they happen, for ever: apart from `run`, since they come from the database."""
        if self._events is None:
            return
        async for event in self._events.subscribe():
            self._viewers.send(_frame("event", event))

    async def _pause(self) -> None:
        """Wait a turn; a first reader is not kept waiting."""
        try:
            async with asyncio.timeout(self.turn_seconds):
                await self._wakes.wait()
        except TimeoutError:
            pass

    async def _look(self) -> None:
        is_first, self._is_looked_at = not self._is_looked_at, True
        changes = await self._fleet.changes()
        self._rates.look(self._requests.num_ended(), asyncio.get_running_loop().time())
        extras = (tuple(self._models()), tuple(self._rates_now().values()))
        if is_first:  # readers came while rows were old: their beginning had none
            self._viewers.send(self._fleet_frame(self._fleet.everything(), full=True))
        elif changes or extras != self._last.extras:
            self._viewers.send(self._fleet_frame(changes, full=False))
        self._last.extras = extras
        requests = self._requests_frame()
        if is_first or requests != self._last.requests:
            self._last.requests = requests
            self._viewers.send(requests)

    def _beginning(self) -> list[bytes]:
        frames = [self._hello, self._cache_frame(whole=True)]
        if self._is_looked_at:
            frames.append(self._fleet_frame(self._fleet.everything(), full=True))
            frames.append(self._requests_frame())
        return frames

    def _fleet_frame(self, changes: Changes, *, full: bool) -> bytes:
        return _frame(
            "fleet",
            {
                "full": full,
                "workers": changes.workers,
                "gone": changes.gone,
                "hosts": changes.hosts,
                "hosts_gone": changes.hosts_gone,
                "models": list(self._models()),
                "rates": self._rates_now(),
            },
        )

    def _rates_now(self) -> dict[str, float | None]:
        share = self._cache.hit_share()
        return {
            "requests_per_second": round(self._rates.requests_per_second, 1),
            "output_tokens_per_second": round(self._fleet.output_tokens_per_second(), 1),
            "cached_share": None if share is None else round(share, 4),
        }

    def _requests_frame(self) -> bytes:
        return _frame("requests", {"data": self._requests.newest(MAX_REQUESTS)})

    def _cache_frame(self, *, whole: bool) -> bytes:
        points = list(self._cache.points)
        shown = points if whole else points[-1:]
        return _frame("cache", {"tiers": self._cache.tiers, "history": [point.to_json() for point in shown]})


def _frame(event: str, data: Any) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + _encode(data) + b"\n\n"
