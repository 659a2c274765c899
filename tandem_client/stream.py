"""Token streams: iterators over an answer's text.

Leaving the loop, leaving the `with` block and `close()` have the same effect: the connection closes, and Tandem stops
after the current step.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Self

import httpx

from tandem_client.errors import StreamTruncated, TandemConnectionError, TandemTimeoutError
from tandem_client.sse import EventDecoder
from tandem_client.wire import StreamEvent, stream_event


class _Progress:
    """State of a stream: the number of pieces, thinking, tool calls, the usage, and whether `[DONE]` was received."""

    def __init__(self) -> None:
        self._decoder = EventDecoder()
        self.num_pieces = 0
        self.on_thinking: Callable[[str], object] | None = None
        self.usage: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.seams: list[dict[str, Any]] = []
        self.done = False
        self._calls: dict[int, tuple[str, str]] = {}
        self._thinking: list[str] = []

    def read(self, chunk: bytes) -> Iterator[str]:
        """Yield the text in `chunk`; record usage and the end; raise the error of an error event."""
        for event in map(stream_event, self._decoder.feed(chunk)):
            self._note(event)
            if event.text:
                self.num_pieces += 1
                yield event.text
            if self.done:
                return

    def _note(self, event: StreamEvent) -> None:
        self.usage = event.usage or self.usage
        self.finish_reason = event.finish_reason or self.finish_reason
        self.seams.extend(event.seams)
        for part in event.calls:
            name, arguments = self._calls.get(part.index, ("", ""))
            self._calls[part.index] = part.name or name, arguments + part.arguments
        self.done = self.done or event.done
        if event.thinking:
            self._thinking.append(event.thinking)
            if self.on_thinking is not None:
                self.on_thinking(event.thinking)

    @property
    def thinking(self) -> str:
        return "".join(self._thinking)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return [{"name": name, "arguments": _object_or_text(text)} for name, text in self._calls.values()]

    def check_complete(self) -> None:
        if not self.done:
            raise self.truncated("the server closed the connection")

    def truncated(self, why: str) -> StreamTruncated:
        message = f"the stream broke off after {self.num_pieces} pieces and without [DONE]: {why}"
        return StreamTruncated(None, 0, message)

    def broken(self, error: httpx.TransportError) -> StreamTruncated | TandemConnectionError:
        if isinstance(error, httpx.TimeoutException):
            return TandemTimeoutError(None, 0, f"no token came within the timeout, after {self.num_pieces} pieces")
        return self.truncated(str(error) or type(error).__name__)


def _object_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class TokenStream(Iterator[str]):
    """An iterator of the answer's pieces, each of one token or a few. Also a context manager."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._progress = _Progress()
        self._pieces = self._read()

    @property
    def usage(self) -> dict[str, Any] | None:
        """Token counts of the server; None until the stream has ended."""
        return self._progress.usage

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """`{"name", "arguments"}` of each call so far; incomplete arguments are text."""
        return self._progress.tool_calls

    @property
    def thinking(self) -> str:
        """The model's thinking so far; "" if there is none."""
        return self._progress.thinking

    def on_thinking(self, show: Callable[[str], object]) -> None:
        """Call `show` with each piece of thinking, as it arrives before the answer's first piece."""
        self._progress.on_thinking = show

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length` or `tool_calls`; None until the stream has ended, or if the server sends none."""
        return self._progress.finish_reason

    @property
    def seams(self) -> list[dict[str, Any]]:
        """`{"choice", "position", "from", "to"}` of each place where the tokens of another numerics class begin.

        Empty until the stream has ended, and for almost every answer.
        """
        return self._progress.seams

    def __next__(self) -> str:
        return next(self._pieces)

    def __iter__(self) -> Iterator[str]:
        # A separate generator: a `for` loop that is left early ends the generator, and with it the connection.
        try:
            yield from self._pieces
        finally:
            self.close()

    def _read(self) -> Generator[str]:
        try:
            for chunk in self._response.iter_bytes():
                yield from self._progress.read(chunk)
                if self._progress.done:
                    return
            self._progress.check_complete()
        except httpx.TransportError as error:
            raise self._progress.broken(error) from error
        finally:
            self._response.close()

    def close(self) -> None:
        """Close the connection, which stops the request. May be called at any time, more than once."""
        self._pieces.close()
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncTokenStream(AsyncIterator[str]):
    """`TokenStream` for asyncio: `async for`, `async with`, `await stream.aclose()`."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._progress = _Progress()
        self._pieces = self._read()

    @property
    def usage(self) -> dict[str, Any] | None:
        """Token counts of the server; None until the stream has ended."""
        return self._progress.usage

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """`{"name", "arguments"}` of each call so far; incomplete arguments are text."""
        return self._progress.tool_calls

    @property
    def thinking(self) -> str:
        """The model's thinking so far; "" if there is none."""
        return self._progress.thinking

    def on_thinking(self, show: Callable[[str], object]) -> None:
        """Call `show` with each piece of thinking, as it arrives before the answer's first piece."""
        self._progress.on_thinking = show

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length` or `tool_calls`; None until the stream has ended, or if the server sends none."""
        return self._progress.finish_reason

    @property
    def seams(self) -> list[dict[str, Any]]:
        """`{"choice", "position", "from", "to"}` of each place where the tokens of another numerics class begin.

        Empty until the stream has ended, and for almost every answer.
        """
        return self._progress.seams

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for piece in self._pieces:
                yield piece
        finally:
            await self.aclose()

    async def _read(self) -> AsyncGenerator[str]:
        try:
            async for chunk in self._response.aiter_bytes():
                for piece in self._progress.read(chunk):
                    yield piece
                if self._progress.done:
                    return
            self._progress.check_complete()
        except httpx.TransportError as error:
            raise self._progress.broken(error) from error
        finally:
            await self._response.aclose()

    async def aclose(self) -> None:
        """Close the connection, which stops the request. May be called at any time, more than once."""
        await self._pieces.aclose()
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
