"""How does an answer leave as server-sent events, and what happens when the client or the stream goes away?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import anyio
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from control_plane.api.http.errors import error_event, face_of
from control_plane.api.services import request_id_of
from tandem_runtime.errors import Cancelled, InternalError, TandemError
from tandem_runtime.log import get_logger

T = TypeVar("T")

log = get_logger(__name__)


class EventStream(EventSourceResponse):
    """Sends ready-made `data:` frames; a failure becomes the face's error event, and then the connection is cut.

    The cut is what tells a client that the answer is not complete: this returns without the final chunk, upon which
    uvicorn closes the connection. `close` is awaited on every way out, also if not one frame was asked for. A client
    that does not read holds up its own stream and nothing else.
    """

    def __init__(
        self,
        request: Request,
        frames: AsyncGenerator[bytes],
        close: Callable[[], Awaitable[None]],
        *,
        ping_seconds: float = 0,
    ) -> None:
        """`frames`: pieces of one frame or more; a comment is sent every `ping_seconds`; 0: never."""
        self._close = close
        # Starlette would add a charset, which real Workers AI does not send.
        headers = {"content-type": "text/event-stream"}
        super().__init__(_with_error_event(request, frames), headers=headers, ping=ping_seconds, sep="\n")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except _StreamBroken:
            pass  # deliberately without the final chunk
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()


class _StreamBroken(Exception):
    """The error event has been sent; now the connection must not end well."""


async def _with_error_event(request: Request, frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        async with aclosing(frames) as pieces:
            async for piece in pieces:
                if piece:
                    yield piece
    except TandemError as error:
        log.warning("stream_failed", path=request.url.path, kind=type(error).__name__, error=error.message)
        yield error_event(face_of(request.url.path), error, request_id_of(request))
        raise _StreamBroken from error
    except Exception as error:  # an answer that is cut off in silence would look complete to some clients
        log.exception("stream_failed", path=request.url.path)
        internal = InternalError(f"internal error ({type(error).__name__}); the server's log has more")
        yield error_event(face_of(request.url.path), internal, request_id_of(request))
        raise _StreamBroken from error


async def while_connected(
    request: Request, work: Coroutine[Any, Any, T], *, discard: Callable[[T], Awaitable[None]] | None = None
) -> T:
    """Return what `work` gives; if the client leaves before, cancel it and raise Cancelled.

    The body must have been read. `discard` gets a result that came too late for anyone to take it.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    taken = False
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise Cancelled("the client closed the connection before the answer was there")
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
