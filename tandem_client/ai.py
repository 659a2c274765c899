"""The synchronous client: `AI().run(model, inputs)`, the same call as `env.AI.run` in a Cloudflare Worker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, overload

import httpx

from tandem_client.connection import DEFAULT_TIMEOUT_SECONDS, Connection, retry_delay_seconds
from tandem_client.errors import TandemAPIError
from tandem_client.inputs import StreamedInputs, WholeInputs
from tandem_client.stream import TokenStream
from tandem_client.wire import error_of, result_of


class AI:
    """A connection to Tandem, or to another server with Cloudflare's REST API of Workers AI.

    Defaults: TANDEM_BASE_URL, TANDEM_TOKEN and TANDEM_ACCOUNT, else the address of `tandem up` on this machine.
    """

    def __init__(self, base_url: str | None = None, token: str | None = None, account: str | None = None) -> None:
        self._connection = Connection.resolve(base_url, token, account)
        # With httpx's default of 100 connections, the 101st stream would wait without a message. The server has limits.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self._http = httpx.Client(limits=limits, **self._connection.client_options)

    @property
    def base_url(self) -> str:
        return self._connection.base_url

    @overload
    def run(
        self,
        model: str,
        inputs: StreamedInputs,
        *,
        extra_headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> TokenStream: ...

    @overload
    def run(
        self,
        model: str,
        inputs: WholeInputs,
        *,
        extra_headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> dict[str, Any]: ...

    @overload
    def run(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        extra_headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> dict[str, Any] | TokenStream: ...

    def run(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        extra_headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> dict[str, Any] | TokenStream:
        """Run `model` and return its result, or, with `"stream": True`, an iterator of its tokens.

        `timeout` is in seconds: until the result, or between two tokens of a stream. A call that does not stream is
        retried twice at most, if the server could not be reached or was busy. Raises TandemAPIError if the server
        refuses the call, streamed or not. The iterator raises errors that occur later.
        """
        options = self._connection.request_options(model, inputs, extra_headers, timeout)
        return self._stream(options) if inputs.get("stream") else self._result(options)

    def models(self) -> list[str]:
        """Return the ids of the models served now."""
        response = self._send(self._connection.models_options, stream=False)
        if not response.is_success:
            raise error_of(response.status_code, response.headers, response.content)
        return [model["id"] for model in response.json()["data"]]

    def close(self) -> None:
        """Close the idle connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _result(self, options: dict[str, Any]) -> Any:
        num_tries = 0
        while True:
            try:
                response = self._send(options, stream=False)
                return result_of(response.status_code, response.headers, response.content)
            except TandemAPIError as error:
                num_tries += 1
                delay = retry_delay_seconds(error, num_tries)
                if delay is None:
                    raise
                time.sleep(delay)

    def _stream(self, options: dict[str, Any]) -> TokenStream:
        response = self._send(options, stream=True)
        if response.is_success:
            return TokenStream(response)
        try:
            body = response.read()
        except httpx.TransportError as error:
            raise self._connection.failed(error) from error
        finally:
            response.close()
        raise error_of(response.status_code, response.headers, body)

    def _send(self, options: dict[str, Any], *, stream: bool) -> httpx.Response:
        try:
            return self._http.send(self._http.build_request(**options), stream=stream)
        except httpx.TransportError as error:
            raise self._connection.failed(error) from error
