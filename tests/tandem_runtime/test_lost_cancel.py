"""A task that is cancelled while its call fails ends: gRPC loses the cancel, and raises the failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from tandem_runtime.calls import TracedChannel
from tandem_runtime.channel import call_error
from tandem_runtime.errors import Unavailable


class _FailingCall:
    """Answers nothing, and fails as a gRPC call that is cancelled in the moment in which it fails."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()

    async def _fail(self, *_: Any) -> None:
        self.waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "connection refused"
            ) from None

    def __await__(self) -> Any:
        return self._fail().__await__()

    def __aiter__(self) -> _FailingCall:
        return self

    __anext__ = read = write = wait_for_connection = _fail


class _Channel:
    def __init__(self, call: _FailingCall) -> None:
        self._call = call

    def _start(self, *_: Any, **__: Any) -> Callable[..., _FailingCall]:
        return lambda *_, **__: self._call

    unary_unary = stream_stream = _start


async def _iterated(channel: TracedChannel) -> None:
    async for _ in channel.stream_stream("/a/b")():
        pass


WAYS: dict[str, Callable[[TracedChannel], Awaitable[Any]]] = {
    "awaited": lambda channel: channel.unary_unary("/a/b")(),
    "iterated": _iterated,
    "read": lambda channel: channel.stream_stream("/a/b")().read(),
    "written": lambda channel: channel.stream_stream("/a/b")().write(b""),
    "connected": lambda channel: channel.stream_stream("/a/b")().wait_for_connection(),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_task_does_not_go_on_after_the_failure_of_its_call(way: str) -> None:
    call = _FailingCall()
    channel: Any = TracedChannel(_Channel(call), call_error)  # type: ignore[arg-type]

    async def attach() -> None:
        with contextlib.suppress(Unavailable):  # a loop would go on
            await WAYS[way](channel)

    task = asyncio.create_task(attach())
    await call.waits.wait()
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()


async def test_a_call_within_the_cleanup_of_a_cancelled_task_fails_as_ever() -> None:
    seen: list[str] = []

    async def cleaned_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            call = _FailingCall()
            channel: Any = TracedChannel(_Channel(call), call_error)  # type: ignore[arg-type]
            call._fail = _refused  # type: ignore[method-assign]
            try:
                await channel.unary_unary("/a/b")()
            except Unavailable as error:
                seen.append(error.message)

    task = asyncio.create_task(cleaned_up())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert seen == ["UNAVAILABLE: refused"]


async def _refused() -> None:
    raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "refused")
