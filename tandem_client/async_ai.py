"""The asyncio client: `await AsyncAI().run(model, inputs)`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, overload

import httpx

from tandem_client.connection import DEFAULT_TIMEOUT_SECONDS, Connection, retry_delay_seconds
from tandem_client.errors import TandemAPIError
from tandem_client.inputs import StreamedInputs, WholeInputs
from tandem_client.stream import AsyncTokenStream
from tandem_client.wire import error_of, result_of


class AsyncAI:
    """`AI` for asyncio. One object serves many tasks of one event loop."""

    def __init__(self, base_url: str | None = None, token: str | None = None, account: str | None = None) -> None:
        self._connection = Connection.resolve(base_url, token, account)
        # With httpx's default of 100 connections, the 101st stream would wait without a message. The server has limits.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self._http = httpx.AsyncClient(limits=limits, **self._connection.client_options)

    @property
    def base_url(self) -> str:
        return self._connection.base_url

    @overload
    async def run(
        self,
        model: str,
        inputs: StreamedInputs,
        *,
        extra_headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> AsyncTokenStream: ...

    @overload
    async def run(
        self,
        model: str,
        inputs: WholeInputs,
        *,
        extra_headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> dict[str, Any]: ...

    @overload
    async def run(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        extra_headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> dict[str, Any] | AsyncTokenStream: ...

    async def run(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        extra_headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> dict[str, Any] | AsyncTokenStream:
        """Run `model` as `AI.run` does; with `"stream": True`, return an iterator for `async for`."""
        options = self._connection.request_options(model, inputs, extra_headers, timeout)
        return await self._stream(options) if inputs.get("stream") else await self._result(options)

    async def models(self) -> list[str]:
        """Return the ids of the models served now."""
        response = await self._send(self._connection.models_options, stream=False)
        if not response.is_success:
            raise error_of(response.status_code, response.headers, response.content)
        return [model["id"] for model in response.json()["data"]]

    async def aclose(self) -> None:
        """Close the idle connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _result(self, options: dict[str, Any]) -> Any:
        num_tries = 0
        while True:
            try:
                response = await self._send(options, stream=False)
                return result_of(response.status_code, response.headers, response.content)
            except TandemAPIError as error:
                num_tries += 1
                delay = retry_delay_seconds(error, num_tries)
                if delay is None:
                    raise
                await asyncio.sleep(delay)

    async def _stream(self, options: dict[str, Any]) -> AsyncTokenStream:
        response = await self._send(options, stream=True)
        if response.is_success:
            return AsyncTokenStream(response)
        try:
            body = await response.aread()
        except httpx.TransportError as error:
            raise self._connection.failed(error) from error
        finally:
            await response.aclose()
        raise error_of(response.status_code, response.headers, body)

    async def _send(self, options: dict[str, Any], *, stream: bool) -> httpx.Response:
        try:
            return await self._http.send(self._http.build_request(**options), stream=stream)
        except httpx.TransportError as error:
            raise self._connection.failed(error) from error
