"""Answers requests that a gateway can no longer serve: those that come while it drains, and those left at the end."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.api.http.errors import error_response
from control_plane.drain import Drain, refusal, time_is_over

_READINESS = frozenset({"/readyz", "/health", "/ping"})
_LIVENESS = "/healthz"


@dataclass(eq=False)
class _Running:
    task: asyncio.Task[object]
    has_started: bool = False
    """The answer's first byte was sent: only its own code can end it well."""
    is_ended: bool = False
    """Cancelled here, for lack of time."""


class DrainGuard:
    """A plain ASGI middleware inside RequestContext.

    A gateway that drains closes its listener and the connections without a request. What still comes, on a connection
    with a request or in the same moment, gets 503 with Retry-After, and the connection closes: SDKs send it again,
    to another gateway. Liveness stays 200.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain
        self._running: set[_Running] = set()
        drain.when_over(self._end_unanswered)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == _LIVENESS:
            await self._app(scope, receive, send)
        elif self._drain.has_begun:
            await _refused(Request(scope, receive))(scope, receive, send)
        else:
            await self._watched(scope, receive, send)

    async def _watched(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None, "the server runs each request in a task"
        running = _Running(task)

        async def note(message: Message) -> None:
            running.has_started = True
            await send(message)

        self._running.add(running)
        try:
            await self._app(scope, receive, note)
        except asyncio.CancelledError:
            if not running.is_ended or running.has_started:
                raise
            task.uncancel()
            response = _closing(error_response(Request(scope, receive), time_is_over()))
            with contextlib.suppress(OSError):  # the client has left meanwhile
                await response(scope, receive, send)
        finally:
            self._running.discard(running)

    def _end_unanswered(self) -> None:
        for running in tuple(self._running):
            if not running.has_started:
                running.is_ended = True
                running.task.cancel()


def _refused(request: Request) -> Response:
    if request.url.path in _READINESS:
        return _closing(JSONResponse({"ready": False, "reason": "the gateway drains"}, status_code=503))
    return _closing(error_response(request, refusal()))


def _closing(response: Response) -> Response:
    response.headers["connection"] = "close"
    return response
