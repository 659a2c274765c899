"""Adds trace, request id and a default deadline to every gRPC call, and raises typed errors.

Wraps gRPC's channel instead of using client interceptors: interceptors add a queue and a task to each stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc

from tandem_runtime import errors, log, tracing
from tandem_runtime.method_channel import MethodChannel, MethodKind, refuse_closed

DEFAULT_TIMEOUT_SECONDS = 30.0
"""The deadline of a unary call without a timeout (law 5)."""

TRACEPARENT = "traceparent"
REQUEST_ID = "tandem-request-id"

Translate = Callable[[grpc.aio.AioRpcError], errors.TandemError]


def cut(call: Any, reason: errors.TandemError) -> None:
    """End a running call: its owner gets `reason`, not the CancelledError of a call that it cancelled itself."""
    call.tandem_reason = reason
    call.cancel()


class TracedChannel(MethodChannel):
    """A channel whose calls carry trace and request id, and raise what `translate` makes of a failure."""

    def __init__(self, channel: grpc.aio.Channel, translate: Translate) -> None:
        self._channel = channel
        self._translate = translate
        self._is_closed = False

    def _method(self, kind: MethodKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        if self._is_closed:
            refuse_closed()
        start = getattr(self._channel, kind)(*args, **kwargs)
        if kind.endswith("stream"):
            return self._caller(start, _StreamCall, None)
        return self._caller(start, _UnaryCall, DEFAULT_TIMEOUT_SECONDS)

    def _caller(self, start: Any, wrap: type[_Call], default_timeout: float | None) -> Callable[..., Any]:
        def call(request: Any = None, *, timeout: float | None = None, metadata: Any = None, **kwargs: Any) -> _Call:
            seconds = default_timeout if timeout is None else timeout
            return wrap(start(request, timeout=seconds, metadata=_metadata(metadata), **kwargs), self._translate)

        return call

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()


class _Call:
    """A running call. Translates failures; everything else is the wrapped call's.

    A task that is cancelled while its call fails ends by the cancel, not by the failure. gRPC waits for tasks of its
    own that swallow the CancelledError, and raises the failure instead: a loop that goes on after failures would go on
    for ever (`_prepare_rpc` and `_invoke` in grpc/aio/_call.py, 1.85).
    """

    def __init__(self, call: Any, translate: Translate) -> None:
        self._call = call
        self._translate = translate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def write(self, request: Any) -> None:
        """Send one message of a stream; raises Unavailable if the call has ended since the last."""
        num_cancels = _num_cancels()
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, num_cancels) from error
        except asyncio.CancelledError:
            self._raise_reason()
            raise
        except asyncio.InvalidStateError as error:  # gRPC raises this for a write to a call that has ended
            raise errors.Unavailable(f"the stream has ended: {error}") from error

    async def wait_for_connection(self) -> None:
        num_cancels = _num_cancels()
        try:
            await self._call.wait_for_connection()
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, num_cancels) from error
        except asyncio.CancelledError:
            self._raise_reason()
            raise

    def _failure(self, error: grpc.aio.AioRpcError, num_cancels: int) -> BaseException:
        """Return what to raise for a failure: a CancelledError if the task was cancelled since it had `num_cancels`."""
        return asyncio.CancelledError() if _num_cancels() > num_cancels else self._translate(error)

    def _raise_reason(self) -> None:
        """Raise why the call was cut, unless it was not, or the waiting task itself is being cancelled."""
        reason: errors.TandemError | None = getattr(self._call, "tandem_reason", None)
        task = asyncio.current_task()
        if reason is not None and task is not None and not task.cancelling():
            raise reason from None


class _UnaryCall(_Call):
    def __await__(self) -> Generator[Any, None, Any]:
        num_cancels = _num_cancels()
        try:
            return (yield from self._call.__await__())
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, num_cancels) from error
        except asyncio.CancelledError:
            self._raise_reason()
            raise


class _StreamCall(_Call):
    def __init__(self, call: Any, translate: Translate) -> None:
        super().__init__(call, translate)
        self._messages: AsyncIterator[Any] | None = None

    def __aiter__(self) -> _StreamCall:
        return self

    async def __anext__(self) -> Any:
        if self._messages is None:
            self._messages = self._call.__aiter__()
        num_cancels = _num_cancels()
        try:
            return await self._messages.__anext__()
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, num_cancels) from error
        except asyncio.CancelledError:
            self._raise_reason()
            raise

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF; as with gRPC, a call is read or iterated, not both."""
        num_cancels = _num_cancels()
        try:
            return await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, num_cancels) from error
        except asyncio.CancelledError:
            self._raise_reason()
            raise


def _num_cancels() -> int:
    """Return how often the current task was asked to end."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _metadata(metadata: Any) -> tuple[tuple[str, Any], ...]:
    carried = ((TRACEPARENT, tracing.current_traceparent()), (REQUEST_ID, log.request_id()))
    return (*(metadata or ()), *(pair for pair in carried if pair[1]))
