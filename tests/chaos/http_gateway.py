"""A gateway as its HTTP clients see it: what is running there, and which errors they must expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx


def http_client(base_url: str) -> httpx.AsyncClient:
    """Return a client with as many connections as requests: a gateway has to refuse those of a burst itself."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=base_url, timeout=120, limits=limits, trust_env=False)


@dataclass(frozen=True)
class Conditions:
    """What makes a gateway refuse requests: at some time since a request was sent, by `time.monotonic`."""

    was_disk_broken: Callable[[float], bool]
    was_overloaded: Callable[[float], bool]


@dataclass(eq=False)
class Call:
    """A request that runs at a gateway."""

    life: int
    has_tokens: bool = False


class HttpGateway:
    """The gateway in the run's process: nobody kills it."""

    life = 0
    """How often the gateway was started before."""

    def __init__(self, name: str, http: httpx.AsyncClient, conditions: Conditions) -> None:
        self.name = name
        self.http = http
        self.calls: set[Call] = set()
        self._conditions = conditions

    @contextmanager
    def calling(self, life: int) -> Iterator[Call]:
        """Count a request that runs at the gateway while the context lasts."""
        call = Call(life)
        self.calls.add(call)
        try:
            yield call
        finally:
            self.calls.discard(call)

    def may_refuse(self, life: int, since: float, status: int, text: str) -> bool:
        """Return whether a request of this life that was sent at `since` may be refused now.

        What cannot be written down does not run, and what has no room waits for it, or is refused.
        """
        if status == 429:
            return self._conditions.was_overloaded(since)
        return status == 503 and "database" in text and self._conditions.was_disk_broken(since)

    def may_lose(self, life: int, *, has_head: bool) -> bool:
        """Return whether a connection of this life may break, after the head of an answer or before."""
        return False
