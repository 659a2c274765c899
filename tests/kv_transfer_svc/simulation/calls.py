"""Carries gRPC calls between the real client and the real servicer over the simulated network.

`Channel` replaces the channel of tandem_runtime.channel. As there, calls raise TandemErrors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from tests.kv_transfer_svc.simulation.network import Network
from tests.kv_transfer_svc.simulation.stream_call import StreamCall
from tests.kv_transfer_svc.simulation.unary_call import UnaryCall
from tests.kv_transfer_svc.simulation.virtual_loop import current_process


class Channel:
    """One process's connection to an address; created by the real client."""

    def __init__(self, network: Network, address: str, *_: Any) -> None:
        process = current_process()
        assert process is not None, "only simulated processes call each other"
        self._network = network
        self._address = address
        self._process = process
        self._calls: dict[Any, None] = {}
        self._is_closed = False

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        async def call(request: Any, *, timeout: float) -> Any:
            made = UnaryCall(self._network, self._process, self._address, path)
            with self._open(made):
                return response_deserializer(await made.run(request_serializer(request), timeout))

        return call

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def call(request: Any, *, timeout: float | None = None) -> StreamCall:
            call = self._stream(path, response_deserializer, timeout)
            call.send(request_serializer(request))
            return call

        return call

    def stream_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """Without a serializer the requests are bytes already, as for gRPC."""
        request_serializer = request_serializer or bytes

        def call(requests: AsyncIterator[Any] | None = None) -> StreamCall:
            call = self._stream(path, response_deserializer, None)
            if requests is None:
                call.open(request_serializer)
            else:
                call.send_all(requests, request_serializer)
            return call

        return call

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        for call in list(self._calls):
            call.channel_closed()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _stream(self, path: str, deserialize: Any, timeout: float | None) -> StreamCall:
        call = StreamCall(self._network, self._process, self._address, path, deserialize, timeout)
        self._open(call)
        call.on_end = lambda: self._calls.pop(call, None)
        return call

    def _open(self, call: Any) -> _Opened:
        if self._is_closed:
            raise grpc.aio.UsageError("Channel is closed.")
        self._calls[call] = None
        return _Opened(self._calls, call)


class _Opened:
    def __init__(self, calls: dict[Any, None], call: Any) -> None:
        self._calls, self._call = calls, call

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._calls.pop(self._call, None)
