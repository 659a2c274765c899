"""A gRPC channel that changes its connection when the certificate of its process is renewed.

gRPC's channel credentials cannot change. So after a renewal:

    new calls       go over a new connection with the new certificate, opened by the first of them, or in a turn of the
                    event loop in which no other channel opens one
    running calls   finish on the old connection, which is closed with the last of them; a call of the health service
                    over the new one shows the server the new certificate, which keeps those running calls valid
                    (`tandem_runtime.certificates.peers`)

When the server's identity is revoked, all calls are cut and new ones refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from tandem_runtime.calls import cut
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.names import Identity, Role, role_dns_name
from tandem_runtime.errors import TandemError
from tandem_runtime.log import get_logger
from tandem_runtime.method_channel import MethodChannel, MethodKind, refuse_closed
from tandem_runtime.tasks import TaskSet

log = get_logger(__name__)

_SHOW_SECONDS = 5.0
"""The deadline of the call that shows a renewed certificate."""

_SHOW_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""The pauses after failures of that call, the last one again and again while a call is left that needs it."""

_HEALTH_CHECK = "/grpc.health.v1.Health/Check"


class RenewedChannel(MethodChannel):
    """A channel to `address`, where a process that proves to be `expect` must answer. Used on one event loop."""

    def __init__(
        self, address: str, member: FleetMember, expect: Identity | Role, options: Sequence[tuple[str, Any]]
    ) -> None:
        self._address = address
        self._member = member
        self._expect = expect
        name = expect.dns_name if isinstance(expect, Identity) else role_dns_name(member.identity.fleet, expect)
        self._options = [*options, ("grpc.ssl_target_name_override", name)]
        self._tasks = TaskSet()
        self._retired: set[_Connection] = set()
        self._connection = self._connect()
        self._is_closed = False
        self._stop_listening = member.certificate.listen(self._current)
        self._dialled = member.peers.dialled(expect, self._cut) if isinstance(expect, Identity) else None

    @property
    def num_connections(self) -> int:
        """1, and one for each certificate before with calls that still run."""
        return 1 + len(self._retired)

    def _method(self, kind: MethodKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Return the starter of one method's calls, each over the connection of its time."""
        connection: _Connection | None = None
        start: Callable[..., Any] | None = None

        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            nonlocal connection, start
            if self._is_closed:
                refuse_closed()
            if isinstance(self._expect, Identity):
                self._member.peers.check(self._expect)
            current = self._current()
            if start is None or connection is not current:
                connection = current
                start = getattr(connection.channel, kind)(*args, **kwargs)
            return connection.started(start(*call_args, **call_kwargs))

        return call

    async def close(self, grace: float | None = None) -> None:
        """Close all connections; calls still running after `grace` seconds are cancelled."""
        if not self._is_closed:
            self._is_closed = True
            self._stop_listening()
            if self._dialled is not None:
                self._dialled.end()
                self._dialled = None  # it refers to this channel, which would wait for the garbage collector
        connections = {self._connection, *self._retired}
        await asyncio.gather(*(connection.channel.close(grace) for connection in connections))
        await self._tasks.cancel()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._connection.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._connection.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._connection.channel.channel_ready()

    def _connect(self) -> _Connection:
        certificate = self._member.certificate
        channel = grpc.aio.secure_channel(self._address, certificate.channel_credentials(), options=self._options)
        return _Connection(channel, certificate.current.generation)

    def _current(self) -> _Connection:
        """Return the connection with the current certificate; open one if the certificate was renewed."""
        if self._connection.generation != self._member.certificate.current.generation and not self._is_closed:
            self._renew()
        return self._connection

    def _renew(self) -> None:
        old, self._connection = self._connection, self._connect()
        self._retired.add(old)
        old.when_idle(lambda: self._tasks.spawn(self._close(old)))
        if self._retired_calls():
            self._tasks.spawn(self._show_certificate(self._connection))

    async def _close(self, old: _Connection) -> None:
        self._retired.discard(old)
        await old.channel.close()

    async def _show_certificate(self, connection: _Connection) -> None:
        """Call the server over the new connection, so that it knows that this process has renewed its certificate."""
        if self._is_closed or connection is not self._connection:
            return  # since this task was spawned
        check = connection.channel.unary_unary(
            _HEALTH_CHECK, health_pb2.HealthCheckRequest.SerializeToString, health_pb2.HealthCheckResponse.FromString
        )
        for pause in chain(_SHOW_PAUSES_SECONDS, repeat(_SHOW_PAUSES_SECONDS[-1])):
            if connection is not self._connection or not self._retired_calls():
                return  # a later renewal shows a later certificate, or nothing is left that needs it
            try:
                await check(health_pb2.HealthCheckRequest(), timeout=_SHOW_SECONDS)
                return
            except grpc.aio.AioRpcError as error:
                log.warning("renewed_certificate_not_shown", address=self._address, reason=error.details())
            await asyncio.sleep(pause)

    def _retired_calls(self) -> int:
        return sum(len(connection.calls) for connection in self._retired)

    def _cut(self, reason: TandemError) -> None:
        for connection in {self._connection, *self._retired}:
            for call in list(connection.calls):
                cut(call, reason)


class _Connection:
    """One gRPC channel and the calls that run over it, with the certificate of one generation."""

    def __init__(self, channel: grpc.aio.Channel, generation: int) -> None:
        self.channel = channel
        self.generation = generation
        self.calls: set[Any] = set()
        self._on_idle: Callable[[], object] | None = None

    def started(self, call: Any) -> Any:
        self.calls.add(call)
        call.add_done_callback(self._ended)
        return call

    def when_idle(self, on_idle: Callable[[], object]) -> None:
        """Call `on_idle` once no call runs; no call may be started from then on."""
        self._on_idle = on_idle
        self._check_idle()

    def _ended(self, call: Any) -> None:
        self.calls.discard(call)
        self._check_idle()

    def _check_idle(self) -> None:
        if not self.calls and self._on_idle is not None:
            on_idle, self._on_idle = self._on_idle, None
            on_idle()
