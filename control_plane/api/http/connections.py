"""Bounds what the connections of all clients can cost: how many, how slow, and how many bytes of bodies.

One object of a process knows its connections. One timer runs while any of them has a deadline, and looks at those that
wait: heads in the order in which they began, bodies all. A connection costs no timer of its own.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from control_plane.api.http.errors import (
    AccountBodiesFull,
    BodiesFull,
    ConnectionsFull,
    RequestTooSlow,
    TooManyUnfinishedHeads,
)
from tandem_runtime import metrics
from tandem_runtime.errors import TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_READ_BYTES = 16 * 1024
"""Bytes that are read from a connection before others get their turn: the most costly take 3 ms to parse."""
_MAX_REFUSED_CONNECTIONS = 256
"""Connections beyond the bound that are answered at the same time; more are closed without an answer."""
_RETRY_SECONDS = 2.0


@dataclass(frozen=True)
class ConnectionLimits:
    """Settings of the HTTP server; control_plane.settings describes them."""

    max_connections: int = 16_384
    max_unfinished_heads: int = 64
    max_head_bytes: int = 65_536
    head_seconds: float = 10.0
    max_body_bytes: int = 10_000_000
    body_stall_seconds: float = 10.0
    min_body_bytes_per_second: int = 1_024
    body_seconds: float = 120.0
    max_bodies_bytes: int = 256 * 1024 * 1024
    max_account_bodies_bytes: int = 40 * 1024 * 1024
    grace_seconds: float = 1.0
    """Heads younger than this do not count as unfinished: a burst of connections brings its heads an instant later."""
    linger_seconds: float = 2.0
    """After a refusal, what the client still sends is read and discarded for so long: a reset would hide the answer."""
    sweep_seconds: float = 1.0

    def within(self, max_open_files: int) -> ConnectionLimits:
        """Return the limits with as many connections as the process may have open files, besides its own files."""
        room = max(max_open_files - _MAX_REFUSED_CONNECTIONS - 512, max_open_files // 2)
        return replace(self, max_connections=min(self.max_connections, room))


class Connection(Protocol):
    """A client's connection, as `Connections` sees it."""

    address: str

    @property
    def is_waiting_for_us(self) -> bool:
        """Whether the client cannot send: reading is paused, or the client waits for 100 Continue."""

    def refuse(self, error: TandemError) -> None:
        """Answer with `error` where an answer is possible, and close."""

    def head_timed_out(self, error: TandemError) -> None:
        """Refuse a head that is incomplete, or close a connection that has sent nothing."""

    def abort(self) -> None:
        """Close without an answer."""


class Body:
    """The body of one request, while it comes and while its bytes count."""

    def __init__(self, connection: Connection, num_expected_bytes: int | None, now: float) -> None:
        self.connection = connection
        self.num_expected_bytes = num_expected_bytes
        """Content-Length; None if the body is chunked."""
        self.num_bytes = 0
        self.num_wire_bytes = 0
        """Bytes of reads since the head, framing included."""
        self.num_held_bytes = 0
        """Bytes that count as in flight."""
        self.is_held = True
        """Whether further bytes count, too: until the body was prepared, or the response starts."""
        self.account: str | None = None
        """Whose bytes these are, once that is known."""
        self.started = now
        self.progressed = now

    @property
    def num_missing_bytes(self) -> int | None:
        return None if self.num_expected_bytes is None else self.num_expected_bytes - self.num_bytes


class BodyHold:
    """What an endpoint says about the body of its request: whose bytes they are, and that they are gone."""

    def __init__(self, connections: Connections, body: Body) -> None:
        self._connections = connections
        self._body = body

    def belongs_to(self, account: str) -> None:
        """Count the body for an account. Raise AccountBodiesFull."""
        self._connections.body_belongs_to(self._body, account)

    def release(self) -> None:
        """Stop counting: nothing holds the body's bytes any more."""
        self._connections.release(self._body)


class Connections:
    """Knows the connections of one process. Every method belongs to the event loop's thread."""

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float] | None = None) -> None:
        self.limits = limits
        self.read_buffer = memoryview(bytearray(_READ_BYTES))
        """The buffer of all reads: a read is parsed before the next one begins."""
        self.num_body_bytes = 0
        """Bytes of bodies that are held."""
        self._account_bytes: Counter[str] = Counter()
        self._clock = clock
        self._open: set[Connection] = set()
        self._heads: dict[Connection, float] = {}
        """When each incomplete head began, the oldest first."""
        self._num_heads: Counter[str] = Counter()
        """Incomplete heads by address."""
        self._crowded: set[str] = set()
        """Addresses that have had more incomplete heads than the limit since the last sweep."""
        self._bodies: dict[Connection, Body] = {}
        """The bodies that are incomplete; of each connection the latest."""
        self._held: dict[Connection, list[Body]] = {}
        """The bodies that count, complete ones too."""
        self._lingering: dict[Connection, float] = {}
        self._refused: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._swept = 0.0
        self._has_skipped = False
        self._none_stalled_until: dict[str | None, float] = {}
        """By account, and None for all."""
        self._refusals = metrics.meter().create_counter(
            "tandem.http.refusals", description="Requests and connections refused by the HTTP server's limits."
        )

    def now(self) -> float:
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()

    @property
    def counts(self) -> Mapping[str, int]:
        """How many connections are open, and how many of them wait for what."""
        return {
            "open": len(self._open),
            "heads": len(self._heads),
            "bodies": len(self._bodies),
            "lingering": len(self._lingering),
        }

    # ------------------------------------------------------------------------------------------------- connections

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)
        excess = len(self._open) - self.limits.max_connections
        if excess > _MAX_REFUSED_CONNECTIONS:
            self.refused("ConnectionsFull")
            connection.abort()
        elif excess > 0:
            connection.refuse(
                ConnectionsFull(
                    f"the gateway has {self.limits.max_connections:,} connections, which is its limit; try again, or "
                    "raise --max-connections",
                    retry_after_seconds=_RETRY_SECONDS,
                )
            )
        else:
            self.head_began(connection)

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._forget(connection)
        self._lingering.pop(connection, None)

    def lingers(self, connection: Connection) -> None:
        """Close the connection after `linger_seconds`, if the client has not closed it before."""
        self._forget(connection)
        self._lingering.setdefault(connection, self.now())
        self._watch()

    def _forget(self, connection: Connection) -> None:
        self.head_ended(connection)
        self.body_ended(connection)
        for body in list(self._held.get(connection, ())):
            self.release(body)

    def refused(self, reason: str) -> None:
        """Count a refusal; the sweep logs the counts."""
        self._refused[reason] += 1
        self._refusals.add(1, {"reason": reason})
        self._watch()

    # ------------------------------------------------------------------------------------------------------- heads

    def head_began(self, connection: Connection) -> None:
        if connection not in self._heads:
            self._heads[connection] = self.now()
            self._num_heads[connection.address] += 1
            if self._num_heads[connection.address] > self.limits.max_unfinished_heads:
                self._crowded.add(connection.address)
            self._watch()

    def head_ended(self, connection: Connection) -> None:
        if self._heads.pop(connection, None) is not None:
            self._num_heads[connection.address] -= 1
            if not self._num_heads[connection.address]:
                del self._num_heads[connection.address]

    # ------------------------------------------------------------------------------------------------------ bodies

    def body_began(self, connection: Connection, num_expected_bytes: int | None) -> Body:
        """Begin a body. Raise BodiesFull if its Content-Length does not fit beside the bodies in flight."""
        if num_expected_bytes is not None and num_expected_bytes <= self.limits.max_body_bytes:
            self._make_room(num_expected_bytes)
        body = self._bodies[connection] = Body(connection, num_expected_bytes, self.now())
        self._held.setdefault(connection, []).append(body)
        self._watch()
        return body

    def body_belongs_to(self, body: Body, account: str) -> None:
        """Count a body's bytes for an account. Raise AccountBodiesFull if they do not fit beside the account's."""
        if not body.is_held or body.account is not None:
            return
        self._make_room_of(account, max(body.num_held_bytes, body.num_expected_bytes or 0))
        body.account = account
        self._account_bytes[account] += body.num_held_bytes

    def body_received(self, body: Body, num_bytes: int) -> None:
        """Count bytes of a body. Raise BodiesFull or AccountBodiesFull if they do not fit beside those in flight."""
        body.num_bytes += num_bytes
        body.progressed = self.now()
        if not body.is_held:
            return
        self._make_room(num_bytes)
        if body.account is not None:
            self._make_room_of(body.account, num_bytes)
            self._account_bytes[body.account] += num_bytes
        body.num_held_bytes += num_bytes
        self.num_body_bytes += num_bytes

    def body_ended(self, connection: Connection) -> None:
        """Stop watching a body. Its bytes count until `release`."""
        self._bodies.pop(connection, None)

    def release(self, body: Body) -> None:
        """Stop counting a body's bytes: the body was prepared, the response starts, or the connection is lost."""
        if not body.is_held:
            return
        self.num_body_bytes -= body.num_held_bytes
        if body.account is not None:
            self._account_bytes[body.account] -= body.num_held_bytes
            if not self._account_bytes[body.account]:
                del self._account_bytes[body.account]
        body.num_held_bytes, body.is_held = 0, False
        held = self._held[body.connection]
        held.remove(body)
        if not held:
            del self._held[body.connection]

    def _make_room(self, num_bytes: int) -> None:
        """Refuse bodies that do not move until `num_bytes` more fit. Raise BodiesFull if that is not enough."""
        limit = self.limits.max_bodies_bytes
        while self.num_body_bytes + num_bytes > limit:
            if not self._refuse_most_stalled(None):
                raise BodiesFull(
                    f"the bodies of requests in progress have {self.num_body_bytes:,} bytes and this one up to "
                    f"{num_bytes:,} more, the limit is {limit:,}; try again",
                    retry_after_seconds=_RETRY_SECONDS,
                )

    def _make_room_of(self, account: str, num_bytes: int) -> None:
        """Do the same for one account's bodies. Raise AccountBodiesFull."""
        limit = self.limits.max_account_bodies_bytes
        while (held := self._account_bytes.get(account, 0)) + num_bytes > limit:
            if not self._refuse_most_stalled(account):
                raise AccountBodiesFull(
                    f"the bodies of this account that are not prepared yet have {held:,} bytes and this one up to "
                    f"{num_bytes:,} more, the limit is {limit:,}; try again later, or have the operator raise "
                    "--max-account-bodies-bytes",
                    retry_after_seconds=_RETRY_SECONDS,
                )

    def _refuse_most_stalled(self, account: str | None) -> bool:
        """Refuse the largest body, of an account or of all, that has not moved for a while. Return whether one was."""
        stalled = self._most_stalled(account)
        if stalled is None:
            return False
        body = self._bodies[stalled]
        stalled.refuse(RequestTooSlow("the body came too slowly while the gateway needed its memory; try again"))
        self._bodies.pop(stalled, None)
        self.release(body)
        return True

    def _most_stalled(self, account: str | None) -> Connection | None:
        now = self.now()
        if now < self._none_stalled_until.get(account, 0.0):
            return None
        stalled = [
            (body.num_held_bytes, connection)
            for connection, body in self._bodies.items()
            if body.num_held_bytes
            and account in (None, body.account)
            and now - body.progressed > self.limits.grace_seconds
            and not connection.is_waiting_for_us
        ]
        if not stalled:
            # A search costs as much as there are bodies.
            self._none_stalled_until[account] = now + self.limits.sweep_seconds
            return None
        return max(stalled, key=lambda each: each[0])[1]

    # ------------------------------------------------------------------------------------------------------- sweep

    def _watch(self) -> None:
        if self._timer is None:
            self._swept = self.now()
            self._timer = asyncio.get_running_loop().call_later(self.limits.sweep_seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self.sweep()
        finally:
            if self._heads or self._bodies or self._lingering or self._refused:
                self._timer = asyncio.get_running_loop().call_later(self.limits.sweep_seconds, self._tick)

    def sweep(self) -> None:
        """Refuse what is over its time.

        A sweep that comes late refuses nothing, once: this process did not read, so the silence is its own.
        """
        now, elapsed = self.now(), self.now() - self._swept
        self._swept = now
        self._none_stalled_until.clear()
        self._log_refusals()
        if elapsed > 1.5 * self.limits.sweep_seconds and not self._has_skipped:
            self._has_skipped = True
            return
        self._has_skipped = False
        self._sweep_heads(now)
        self._sweep_crowded(now)
        for connection, body in list(self._bodies.items()):
            if connection.is_waiting_for_us:
                body.started, body.progressed = body.started + elapsed, now
            elif (reason := self._slowness(body, now)) is not None:
                connection.refuse(RequestTooSlow(reason))
        for connection, since in list(self._lingering.items()):
            if now - since < self.limits.linger_seconds:
                break
            connection.abort()

    def _sweep_heads(self, now: float) -> None:
        limit = self.limits.head_seconds
        for connection, since in list(self._heads.items()):
            if now - since < limit:
                break
            self.head_ended(connection)
            connection.head_timed_out(
                RequestTooSlow(f"the request's head was not complete after {limit:g} s; send it at once")
            )

    def _sweep_crowded(self, now: float) -> None:
        """Refuse the oldest incomplete heads of addresses that have too many."""
        limit = self.limits.max_unfinished_heads
        crowded = {address for address in self._crowded if self._num_heads[address] > limit}
        self._crowded = crowded
        if not crowded:
            return
        for connection, since in list(self._heads.items()):
            if now - since < self.limits.grace_seconds:
                break
            if connection.address in crowded and self._num_heads[connection.address] > limit:
                self.head_ended(connection)
                connection.head_timed_out(
                    TooManyUnfinishedHeads(
                        f"this address has more than {limit} connections without a complete head, which is the limit; "
                        "open a connection when there is a request to send",
                        retry_after_seconds=_RETRY_SECONDS,
                    )
                )

    def _slowness(self, body: Body, now: float) -> str | None:
        """Return why a body is too slow, or None."""
        limits, age = self.limits, now - body.started
        if now - body.progressed > limits.body_stall_seconds:
            return f"no byte of the body came for {limits.body_stall_seconds:g} s, which is the limit; send it faster"
        if age > limits.body_stall_seconds and body.num_bytes < age * limits.min_body_bytes_per_second:
            return (
                f"the body came with {body.num_bytes / age:,.0f} bytes per second, the least is "
                f"{limits.min_body_bytes_per_second:,}; send it faster"
            )
        if age > limits.body_seconds:
            return f"the body was not complete after {limits.body_seconds:g} s, which is the limit; send it faster"
        return None

    def _log_refusals(self) -> None:
        for reason, num in self._refused.items():
            log.warning("http_refused", reason=reason, num=num)
        self._refused.clear()


def address_of(client: tuple[str, int] | None) -> str:
    """Return what counts as one address: an IPv4 address, or a /64 of IPv6, which one customer usually has."""
    if client is None:
        return ""
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False).network_address)
    return str(address)
