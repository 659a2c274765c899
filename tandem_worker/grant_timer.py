"""Divides a worker's room among gateways soon after it or their demand has changed, and sends the grants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tandem.v1 import types_pb2 as pb
from tandem_worker.grants import RENEW_SECONDS, UNUSED_SECONDS, Grant, GrantDivider, Room

_QUIET_SECONDS = 0.05
"""While nothing waits at the gateways, grants are looked at so often, at most."""

_Key = TypeVar("_Key", bound=Hashable)


class GrantTimer(Generic[_Key]):
    """When one worker's room is divided; every method runs on the event loop.

    Whatever happens in one turn of the loop is one division.
    """

    def __init__(
        self,
        divider: GrantDivider[_Key],
        room: Callable[[], Room],
        send: Callable[[_Key, pb.Grant], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`room` returns what the worker can take now; `send` sends a grant to a gateway."""
        self._divider = divider
        self._room = room
        self._send = send
        self._clock = clock
        self._is_open = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self._is_open

    def open(self) -> None:
        """The worker is ready."""
        self._is_open = True
        self.look(0.0)

    def close(self) -> None:
        """Grant nothing more: the worker drains, or ends."""
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def changed(self) -> None:
        """The room may be larger: look at once if anything waits for that."""
        self.look(0.0 if self._divider.has_waiting else _QUIET_SECONDS)

    def look(self, seconds: float) -> None:
        """Divide the room within so many seconds."""
        if not self._is_open or not len(self._divider):
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._divide)

    def renewed(self, key: _Key) -> pb.Grant:
        """Divide at once; return the grant of the gateway that waits for it, and send the others."""
        grants = self._divider.renewed(key, self._room(), self._clock())
        own = grants.pop(key)
        self._send_all(grants)
        return grant_to_proto(own)

    def _divide(self) -> None:
        self._timer = None
        self._send_all(self._divider.divide(self._room(), self._clock()))
        self.look(UNUSED_SECONDS if self._divider.has_waiting else RENEW_SECONDS)

    def _send_all(self, grants: dict[_Key, Grant]) -> None:
        for key, grant in grants.items():
            self._send(key, grant_to_proto(grant))


def grant_to_proto(grant: Grant) -> pb.Grant:
    return pb.Grant(
        number=grant.number,
        num_tokens=grant.num_tokens,
        num_requests=grant.num_requests,
        valid_ms=int(1000 * grant.valid_seconds),
        turns=[
            pb.AccountTurn(
                fairness_key=each.account,
                service_class=each.service_class,
                lead=each.lead,
                num_elsewhere=each.num_elsewhere,
                work_elsewhere=each.work_elsewhere,
                work_per_second_elsewhere=each.work_per_second_elsewhere,
            )
            for each in grant.turns
        ],
        work_elsewhere=grant.work_elsewhere,
        num_elsewhere=grant.num_elsewhere,
    )
