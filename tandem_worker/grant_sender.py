"""Sends grants to the gateways attached to a worker, when its room or their demand has changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from tandem.v1 import types_pb2 as pb
from tandem_engine.messages import EngineStats, Mode
from tandem_worker.grants import RENEW_SECONDS, Demand, Grant, GrantDivider, Room, SlowStart
from tandem_worker.requests import ActiveRequest, GatewayStream

_QUEUED_SHARE = 8
"""An eighth as many requests as run at once may wait here, so that a free seat is taken in the next step."""
_QUIET_SECONDS = 0.05
"""While nothing waits at the gateways, grants are looked at so often, at most."""
_FULL_SECONDS = 0.5
"""After the engine has refused a request, no room as large is granted for so long, unless a request ends before."""


class GrantSender:
    """The grants of one worker; every method runs on the event loop."""

    def __init__(self, max_num_seqs: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_num_seqs`: requests that run at once; None: gateways are granted nothing, and estimate the room."""
        self.is_used = max_num_seqs is not None
        self._num_places = (max_num_seqs or 0) + max(1, (max_num_seqs or 0) // _QUEUED_SHARE)
        self._clock = clock
        self._divider: GrantDivider[GatewayStream] = GrantDivider()
        self._slow_start = SlowStart(self._num_places)
        self._stats: EngineStats | None = None
        self._block_size = 0
        self._is_open = False
        self._num_requests = 0
        self._unallocated: dict[str, int] = {}
        """Tokens of requests that have no blocks in `stats` yet, by request key."""
        self._reserved: set[str] = set()
        """Hand-overs that have blocks since the last stats."""
        self._without_token: set[str] = set()
        self._full_until, self._refused_tokens = 0.0, 0
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------------------- gateways

    def attach(self, stream: GatewayStream) -> None:
        """A gateway that uses grants has said hello."""
        if self.is_used:
            self._divider.attach(stream)
            self._look(0.0)

    def detach(self, stream: GatewayStream) -> None:
        if stream in self._divider:
            self._divider.detach(stream)
            self._look(0.0)

    def demanded(self, stream: GatewayStream, demand: pb.Demand) -> None:
        """A gateway reports what waits there, or the grant that it has got."""
        if stream in self._divider:
            self._divider.seen(stream, demand.grant_number)
            if demand.HasField("waiting"):
                self._divider.demanded(stream, demand_of(demand.waiting), self._clock())
            self._look(0.0)

    def received(self, stream: GatewayStream, submit: pb.Submit) -> None:
        """A request has come, whatever becomes of it."""
        if stream in self._divider and submit.HasField("grant_tokens"):
            self._divider.submitted(stream, submit.grant_tokens, self._clock())

    def refused(self, request: ActiveRequest) -> pb.Grant | None:
        """Return the grant to send with a refusal of the engine, after the request has ended.

        What the engine keeps for others is not in its stats, so no request as large has room until something changes.
        """
        if self._num_requests:
            self._full_until, self._refused_tokens = self._clock() + _FULL_SECONDS, _num_tokens(request.submit)
        stream = request.stream
        if stream not in self._divider:
            return None
        grants = self._divider.renewed(stream, self._room(), self._clock())
        own = grants.pop(stream)
        self._send(grants)
        self._look(_FULL_SECONDS)
        return grant_to_proto(own)

    # ------------------------------------------------------------------------------------------------- requests

    def began(self, request: ActiveRequest) -> None:
        """The engine is about to get a request."""
        self._num_requests += 1
        self._unallocated[request.key] = _num_tokens(request.submit)
        self._without_token.add(request.key)

    def reserved(self, request: ActiveRequest, mode: Mode) -> None:
        """The engine has accepted a request; one of mode decode has its blocks by that."""
        if mode == "decode":
            self._reserved.add(request.key)

    def answered(self, request: ActiveRequest, num_tokens: int) -> None:
        """A step has computed tokens of a request's answer."""
        self._divider.answered(request.stream, num_tokens)
        if request.key in self._without_token:
            self._without_token.discard(request.key)
            self._unallocated.pop(request.key, None)
            self._slow_start.first_token()

    def ended(self, request: ActiveRequest) -> None:
        self._num_requests -= 1
        self._unallocated.pop(request.key, None)
        self._reserved.discard(request.key)
        self._without_token.discard(request.key)
        self._full_until = 0.0
        self._changed()

    def stepped(self, stats: EngineStats, admitted: Iterable[str]) -> None:
        """A step has ended, with these stats. Requests that were `admitted` have left the engine's queue."""
        self._stats = stats
        for key in (*self._reserved, *admitted):
            self._unallocated.pop(key, None)
        self._reserved.clear()
        self._changed()

    # ---------------------------------------------------------------------------------------------------- state

    def opened(self, stats: EngineStats, block_size: int) -> None:
        """The worker is ready."""
        self._stats, self._block_size, self._is_open = stats, block_size, True
        self._look(0.0)

    def close(self) -> None:
        """Grant nothing more: the worker drains, or ends."""
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _room(self) -> Room:
        """Return what the worker can take beside what it has got."""
        stats, now = self._stats, self._clock()
        if stats is None or not self._is_open:
            return Room(0, 0)
        num_growing = self._num_requests - len(self._unallocated)
        num_free = (stats.num_free_blocks + stats.num_cached_blocks - num_growing) * self._block_size
        num_free -= sum(self._unallocated.values())
        if now < self._full_until:
            num_free = min(num_free, self._refused_tokens - 1)
        num_places = self._slow_start.bound(self._num_places - self._num_requests, len(self._without_token))
        return Room(
            max(0, num_free),
            max(0, num_places),
            tokens_per_request=2 * self._block_size,
            most_tokens=stats.num_total_blocks * self._block_size,
            is_idle=not self._num_requests,
        )

    # --------------------------------------------------------------------------------------------------- sending

    def _changed(self) -> None:
        """The room may be larger: look at once if anything waits for that."""
        self._look(0.0 if self._divider.has_waiting else _QUIET_SECONDS)

    def _look(self, seconds: float) -> None:
        """Divide the room within so many seconds; whatever happens in one turn of the loop is one division."""
        if not self._is_open or not len(self._divider):
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._divide)

    def _divide(self) -> None:
        self._timer = None
        self._send(self._divider.divide(self._room(), self._clock()))
        self._look(RENEW_SECONDS)

    def _send(self, grants: dict[GatewayStream, Grant]) -> None:
        for stream, grant in grants.items():
            stream.send(pb.Event(grant=grant_to_proto(grant)))


def _num_tokens(submit: pb.Submit) -> int:
    return submit.grant_tokens if submit.HasField("grant_tokens") else len(submit.token_ids)


def demand_of(message: pb.WaitingRequests) -> Demand:
    demand = Demand(message.num_tokens, message.num_requests, message.first_tokens, message.first_requests or 1)
    accounts = {each.account: each.num_tokens for each in message.accounts}
    return replace(demand, accounts=accounts) if accounts else demand


def grant_to_proto(grant: Grant) -> pb.Grant:
    return pb.Grant(
        number=grant.number,
        num_tokens=grant.num_tokens,
        num_requests=grant.num_requests,
        valid_ms=int(1000 * grant.valid_seconds),
        parts=[pb.AccountPart(account=account, part=part) for account, part in grant.parts.items()],
    )
