"""Which id, which trace and which duration does an HTTP request have?"""

from __future__ import annotations

import time
from uuid import uuid4

from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.api.http.errors import bug_response
from tandem_runtime import metrics, tracing


class RequestContext:
    """Gives each request an id (sent back as `cf-ai-req-id` and `x-request-id`) and a server span around all of it.

    A plain ASGI middleware: nothing stands between an endpoint and the client's disconnect.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._durations = metrics.meter().create_histogram(
            "http.server.request.duration", unit="s", description="From the request's head to the answer's last byte."
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = str(uuid4())
        scope.setdefault("state", {})["request_id"] = request_id
        exchange = _Exchange(request_id, send)
        started = time.perf_counter()
        with tracing.tracer().start_as_current_span(
            f"{scope['method']} {scope['path']}",
            context=propagate.extract(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "tandem.request_id": request_id,
            },
        ) as span:
            try:
                await self._app(scope, receive, exchange.send)
            except Exception as error:
                if exchange.has_started:  # too late for words: the server cuts the connection
                    raise
                await bug_response(Request(scope, receive), error)(scope, receive, exchange.send)
            finally:
                span.set_attribute("http.response.status_code", exchange.status)
                if exchange.status >= 500:
                    span.set_status(trace.StatusCode.ERROR)
                labels = {"http.request.method": scope["method"], "http.response.status_code": exchange.status}
                self._durations.record(time.perf_counter() - started, labels)


class _Exchange:
    """Passes a response on, with the request's id in its headers, and remembers its status."""

    def __init__(self, request_id: str, send: Send) -> None:
        self._request_id = request_id
        self._send = send
        self.status = 499
        """Until a response starts: the client left before."""
        self.has_started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.has_started = True
            headers = MutableHeaders(scope=message)
            headers["cf-ai-req-id"] = self._request_id
            headers["x-request-id"] = self._request_id
        await self._send(message)
