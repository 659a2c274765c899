"""A stream over the simulated network, with both its ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from tandem_runtime.errors import Cancelled, DeadlineExceeded, InternalError, TandemError, from_proto
from tests.kv_transfer_svc.simulation.network import Network, Pipe, unreachable
from tests.kv_transfer_svc.simulation.virtual_loop import Process

_END = object()


class StreamCall:
    """The client's end of a stream; has the interface of a gRPC call. Attach also sends requests."""

    def __init__(
        self,
        network: Network,
        client: Process,
        address: str,
        path: str,
        deserialize: Callable[[bytes], Any],
        timeout: float | None,
    ) -> None:
        self.on_end: Callable[[], Any] = lambda: None
        self._network = network
        self._client = client
        self._address = address
        self._deserialize = deserialize
        self._items: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._is_over = False
        self._trailing: tuple[tuple[str, Any], ...] = ()
        self._serialize: Callable[[Any], bytes] = bytes
        self._sending: asyncio.Task[None] | None = None
        self._far: ServedStream | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout, self._time_out) if timeout is not None else None
        server = network.servers.get(address)
        if server is None or server.process.is_dead:
            network.later(network.delay(), self.broken, "connection refused")
            return
        self.ends = client, server.process
        self._there, self._back = Pipe(network, client, server.process), Pipe(network, server.process, client)
        self._far = ServedStream(network, self, server.methods[path], self._back)
        network.open(self)

    # ------------------------------------------------------------------------------------------- as in gRPC

    def __aiter__(self) -> StreamCall:
        return self

    async def __anext__(self) -> Any:
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        item = self._items[0]
        if item is _END:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        self._items.popleft()
        return item

    def cancel(self) -> None:
        if not self._is_over:
            self.end(Cancelled("the caller cancelled the call"))
            self._tell_server()

    async def write(self, request: Any) -> None:
        if self._is_over and isinstance(self._items[-1], TandemError):
            raise self._items[-1]
        self.send_one(request)

    async def read(self) -> Any:
        try:
            return await anext(self)
        except StopAsyncIteration:
            return grpc.aio.EOF

    async def trailing_metadata(self) -> tuple[tuple[str, Any], ...]:
        return self._trailing

    # ------------------------------------------------------------------------------------------------ sending

    def send(self, request: bytes) -> None:
        if self._far is not None:
            self._there.send(self._far.start, request)

    def open(self, serialize: Callable[[Any], bytes]) -> None:
        """Open a stream whose requests are written one by one."""
        self._serialize = serialize
        if self._far is not None:
            self._there.send(self._far.start, None)

    def send_one(self, request: Any) -> None:
        if self._far is not None:
            self._there.send(self._far.receive, self._serialize(request))

    def send_all(self, requests: AsyncIterator[Any], serialize: Callable[[Any], bytes]) -> None:
        if self._far is not None:
            self._there.send(self._far.start, None)
            self._sending = asyncio.get_running_loop().create_task(self._send_each(requests, serialize))

    async def _send_each(self, requests: AsyncIterator[Any], serialize: Callable[[Any], bytes]) -> None:
        assert self._far is not None, "started only with a server"
        async for request in requests:
            self._there.send(self._far.receive, serialize(request))
        self._there.send(self._far.receive, None)

    # ------------------------------------------------------------------------------------------------- ending

    def take(self, message: bytes) -> None:
        if not self._is_over:
            self._items.append(self._deserialize(message))
            self._arrived.set()

    def end(self, error: BaseException | None, trailing: tuple[tuple[str, Any], ...] = ()) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._trailing = trailing
        self._items.append(_END if error is None else error)
        self._arrived.set()
        self._network.close(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()
        self.on_end()

    def broken(self, why: str) -> None:
        """End both ends with an error; called by the network."""
        error = unreachable(self._address, why)
        self._network.later(self._network.delay(), self._client.call, self.end, error)
        if self._far is not None:
            self._back.close()
            self._there.close()
            self._far.process.call(self._far.cancel)

    def channel_closed(self) -> None:
        """Handle a closed channel: gRPC then cancels every waiting caller."""
        if not self._is_over:
            self.end(asyncio.CancelledError())
            self._tell_server()

    def _tell_server(self) -> None:
        if self._far is not None:
            self._there.send(self._far.cancel)

    def _time_out(self) -> None:
        if not self._is_over:
            self.end(DeadlineExceeded(f"DEADLINE_EXCEEDED: a stream of {self._address}"))
            self._tell_server()


class ServedStream:
    """The server's end of a stream; also the servicer's context."""

    def __init__(self, network: Network, call: StreamCall, method: Callable[..., Any], back: Pipe) -> None:
        self._network = network
        self._call = call
        self._method = method
        self._back = back
        self._task: asyncio.Task[None] | None = None
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._trailing: tuple[tuple[str, Any], ...] = ()
        self._is_cancelled = False
        self.process = call.ends[1]

    def set_trailing_metadata(self, trailing: tuple[tuple[str, Any], ...]) -> None:
        self._trailing = trailing

    def start(self, request: bytes | None) -> None:
        if not self._is_cancelled:
            self._task = asyncio.get_running_loop().create_task(self._run(request))

    def receive(self, request: bytes | None) -> None:
        self._requests.put_nowait(request)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def requests(self) -> AsyncIterator[bytes]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def _run(self, request: bytes | None) -> None:
        messages = self._method(self.requests() if request is None else request, self)
        try:
            async for message in messages:
                self._back.send(self._call.take, message)
        except TandemError as error:
            self._back.send(self._call.end, from_proto(error.to_proto()))
        except Exception as error:  # noqa: BLE001 - reported as a violation
            self._network.on_violation(f"a stream raised {error!r}")
            self._back.send(self._call.end, InternalError(repr(error)))
        else:
            self._back.send(self._call.end, None, self._trailing)
        finally:
            await messages.aclose()
