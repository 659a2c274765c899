"""A gRPC channel to a server of this release or of release 0.2: over TLS if the server takes it, else in plain text.

Used until the time of `--plaintext-until`, for servers of which the role is known, and not the id
(`tandem_runtime.certificates.plaintext`). Calls over TLS start at once. All others wait for the look at the server,
which costs a connection each few seconds; so a call is over TLS soon after its server was replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from typing import Any

import grpc

from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.names import Role
from tandem_runtime.errors import Unavailable
from tandem_runtime.method_channel import MethodChannel, MethodKind
from tandem_runtime.renewed_channel import RenewedChannel
from tandem_runtime.tasks import TaskSet

_LAST_CALLS_SECONDS = 30.0
"""Seconds that calls in plain text may take after the first one over TLS."""


class EitherChannel(MethodChannel):
    """A channel to `address`, where a process of `role` answers, or one of release 0.2. Used on one event loop."""

    def __init__(self, address: str, member: FleetMember, role: Role, options: Sequence[tuple[str, Any]]) -> None:
        self._address = address
        self._member = member
        self._role = role
        self._options = options
        self._encrypted: RenewedChannel | None = None
        self._plain: grpc.aio.Channel | None = None
        self._look = asyncio.Lock()
        self._closing = TaskSet()
        self._is_closed = False

    def _method(self, kind: MethodKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Return the starter of one method's calls."""

        def call(request: Any = None, *, timeout: float | None = None, **call_kwargs: Any) -> Any:
            if self._encrypted is not None:
                return getattr(self._encrypted, kind)(*args, **kwargs)(request, timeout=timeout, **call_kwargs)
            return _LaterCall(started(request, timeout, call_kwargs))

        async def started(request: Any, timeout: float | None, call_kwargs: dict[str, Any]) -> Any:
            loop = asyncio.get_running_loop()
            called_at = loop.time()
            channel = await self._channel()
            left = None if timeout is None else max(0.0, timeout - (loop.time() - called_at))
            return getattr(channel, kind)(*args, **kwargs)(request, timeout=left, **call_kwargs)

        return call

    async def _channel(self) -> grpc.aio.Channel:
        """Return the channel for a new call. Raises Unavailable if the server does not answer."""
        async with self._look:
            takes_tls = await self._member.plaintext.takes_tls(self._address)
        if self._is_closed:
            raise Unavailable(f"the channel to {self._address} was closed")
        if not takes_tls and self._encrypted is None:  # a call that waited meanwhile may have found TLS
            if self._plain is None:
                self._plain = grpc.aio.insecure_channel(self._address, options=self._options)
            return self._plain
        if self._encrypted is None:
            self._encrypted = RenewedChannel(self._address, self._member, self._role, self._options)
            if self._plain is not None:  # of the process that ran there before
                self._closing.spawn(self._plain.close(_LAST_CALLS_SECONDS))
        return self._encrypted

    async def close(self, grace: float | None = None) -> None:
        """Close both connections; calls still running after `grace` seconds are cancelled."""
        self._is_closed = True
        channels = [channel for channel in (self._encrypted, self._plain) if channel is not None]
        await self._closing.cancel()
        await asyncio.gather(*(channel.close(grace) for channel in channels))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        channel = self._encrypted or self._plain
        return grpc.ChannelConnectivity.IDLE if channel is None else channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await (await self._channel()).wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await (await self._channel()).channel_ready()


class _LaterCall:
    """A call whose channel is being chosen. Behaves as the call that it becomes, so far as `calls` uses one."""

    def __init__(self, start: Coroutine[Any, Any, Any]) -> None:
        self._started = asyncio.ensure_future(start)
        self._started.add_done_callback(_seen)

    def cancel(self) -> bool:
        """Cancel the call; return False if it had ended."""
        if not self._started.done():
            return self._started.cancel()
        if self._started.cancelled() or self._started.exception() is not None:
            return False
        return bool(self._started.result().cancel())

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        return await (await self._started)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in await self._started:
            yield message

    async def read(self) -> Any:
        return await (await self._started).read()

    async def write(self, request: Any) -> None:
        await (await self._started).write(request)

    async def done_writing(self) -> None:
        await (await self._started).done_writing()

    async def trailing_metadata(self) -> Any:
        return await (await self._started).trailing_metadata()

    async def wait_for_connection(self) -> None:
        await (await self._started).wait_for_connection()


def _seen(started: asyncio.Future[Any]) -> None:
    """Take note of an error, which reaches the call's owner if that still waits."""
    if not started.cancelled():
        started.exception()
