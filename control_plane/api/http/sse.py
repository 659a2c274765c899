"""Sends an answer as server-sent events, and stops the work when the client or the stream goes away."""

from __future__ import annotations

import asyncio
import secrets
import string
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import anyio
import msgspec
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from control_plane.api.http.errors import error_event, error_format_of
from control_plane.api.http.request_context import request_id_of, timeline_of
from control_plane.api.http.route_names import name_of
from tandem_runtime.errors import Cancelled, InternalError, TandemError
from tandem_runtime.log import get_logger

T = TypeVar("T")

log = get_logger(__name__)

DONE = b"data: [DONE]\n\n"
_CHARACTERS = string.ascii_lowercase + string.digits
ALL_FILLERS = tuple(_CHARACTERS[:length] for length in range(1, len(_CHARACTERS) + 1))
_MARK = secrets.token_hex(16)
"""Placeholder for the text. It is random, so that it occurs in no name of a client."""
_RANDOM_BYTES = 4096

_to_json = msgspec.json.Encoder().encode
_ESCAPES = {character.encode(): rf"\u{ord(character):04x}".encode() for character in "\x85\u2028\u2029"}
"""Characters at which many clients break lines, httpx's `iter_lines` among them, though the standard does not."""


def _encode(value: Any) -> bytes:
    """Return JSON without any character that a client may take for the end of a line."""
    encoded = _to_json(value)
    if not encoded.isascii():
        for character, escape in _ESCAPES.items():
            encoded = encoded.replace(character, escape)
    return encoded


class EventStream(EventSourceResponse):
    """Sends encoded `data:` frames. A failure becomes an error event, then the connection is cut.

    The cut shows the client that the answer is incomplete: this returns without HTTP's final chunk, and uvicorn then
    closes the connection. `close` is always awaited, even if no frame was read. A client that does not read its
    stream delays only that stream.
    """

    def __init__(
        self,
        request: Request,
        frames: AsyncGenerator[bytes],
        close: Callable[[], Awaitable[None]],
        *,
        ping_seconds: float = 0,
    ) -> None:
        """`frames` yields pieces of one or more frames. A comment is sent every `ping_seconds`; 0 for never."""
        self._close = close
        # Starlette would add a charset. Workers AI does not send one.
        headers = {"content-type": "text/event-stream"}
        super().__init__(_with_error_event(request, frames), headers=headers, ping=ping_seconds, sep="\n")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except _StreamBroken:
            pass  # deliberately without HTTP's final chunk
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()
            # The response's tasks that anyio cancelled refer to the response in a cycle, which stays for long.
            del self._close, self.body_iterator

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Send a piece without anyio's cancel scope for a time limit: there is none, and every token paid for it."""
        await send(message)


class _StreamBroken(Exception):
    """The error event has been sent, and the connection must now be cut."""


async def _with_error_event(request: Request, frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        async with aclosing(frames) as pieces:
            async for piece in pieces:
                if piece:
                    yield piece
                    break
            timeline_of(request).written()
            async for piece in pieces:
                if piece:
                    yield piece
    except TandemError as error:
        log.warning("stream_failed", route=name_of(request.scope), kind=type(error).__name__, error=error.log_text)
        yield frame(error_event(error_format_of(request.url.path), error, request_id_of(request)))
        raise _StreamBroken from error
    except Exception as error:  # without an error event, the cut answer would look complete to some clients
        log.exception("stream_failed", route=name_of(request.scope))
        internal = InternalError(f"internal error ({type(error).__name__}); the server's log has the details")
        yield frame(error_event(error_format_of(request.url.path), internal, request_id_of(request)))
        raise _StreamBroken from error


async def while_connected(
    request: Request, work: Coroutine[Any, Any, T], *, discard: Callable[[T], Awaitable[None]] | None = None
) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise Cancelled.

    Call this after the body has been read. `discard` releases a result that arrives after the disconnect.
    """
    worker = asyncio.create_task(work, name=name_of(request.scope))
    watcher = asyncio.ensure_future(_disconnected(request))
    taken = False
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise Cancelled("the client closed the connection before the answer was ready")
        taken = True
        return worker.result()
    finally:
        watcher.cancel()
        worker.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({worker, watcher})
            if not taken and discard is not None and not worker.cancelled() and worker.exception() is None:
                await discard(worker.result())


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def frame(event: Any) -> bytes:
    """Return an event with `event` as JSON in its data."""
    return b"data: " + _encode(event) + b"\n\n"


class TextFrames:
    """Encodes frames of one object in which only the text changes, faster than encoding each object."""

    def __init__(self, event_with: Callable[[str], Any]) -> None:
        """`event_with` returns the object for a text. It is called once, with a placeholder."""
        self._before, _, self._after = frame(event_with(_MARK)).partition(_encode(_MARK))

    def frame(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


class Fillers:
    """Fillers of 1 to 36 characters hide the length of each event: on TLS, lengths can reveal tokens.

    The lengths come from the system's random numbers, read 4,096 bytes at a time.
    """

    def __init__(self) -> None:
        self._random = b""
        self._position = 0

    def next(self) -> str:
        while True:
            if self._position == len(self._random):
                self._random, self._position = secrets.token_bytes(_RANDOM_BYTES), 0
            byte = self._random[self._position]
            self._position += 1
            if byte < 252:  # 252 is a multiple of 36: every length is equally likely
                return ALL_FILLERS[byte % len(ALL_FILLERS)]


FILLERS = Fillers()
