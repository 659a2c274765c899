"""A stub gateway on a real port, for tests of its clients.

It has the REST API of Workers AI. The model's name selects its behaviour. `calls` has all requests.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from tests.tandem_client.serving import serve

USAGE = {
    "prompt_tokens": 4,
    "completion_tokens": 3,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 2},
}


@dataclass
class Call:
    """One received request."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class StubGateway:
    """The stub's address and the requests to it."""

    url: str = ""
    calls: list[Call] = field(default_factory=list)
    models: list[str] = field(default_factory=lambda: ["@tandem/demo", "@tandem/other"])
    workers: dict[str, Any] = field(default_factory=lambda: {"object": "list", "data": []})
    requests: dict[str, Any] = field(default_factory=lambda: {"object": "list", "data": []})
    events: dict[str, Any] = field(default_factory=lambda: {"object": "list", "data": []})
    drained: dict[str, Any] | None = None
    """The answer to a drain; None: there is no such worker."""
    explanations: dict[str, Any] = field(default_factory=dict)
    """By request id."""
    client_left: threading.Event = field(default_factory=threading.Event)
    """Set when the client of an endless stream has closed its connection."""

    def app(self) -> ASGIApp:
        return Starlette(
            routes=[
                Route("/client/v4/accounts/{account}/ai/run/{model:path}", self._run, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/workers", self._workers),
                Route("/v1/requests", self._requests),
                Route("/v1/events", self._events),
                Route("/v1/workers/{worker}/{action}", self._drain, methods=["POST"]),
                Route("/v1/requests/{request_id}/explain", self._explanation),
            ]
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": model, "object": "model"} for model in self.models]})

    async def _events(self, request: Request) -> Response:
        return JSONResponse(self.events)

    async def _drain(self, request: Request) -> Response:
        self.calls.append(Call(request.url.path, dict(request.headers), None))
        if self.drained is None:
            return JSONResponse({"error": {"message": "no worker has this id"}}, status_code=404)
        return JSONResponse(self.drained)

    async def _requests(self, request: Request) -> Response:
        return JSONResponse(self.requests)

    async def _explanation(self, request: Request) -> Response:
        explained = self.explanations.get(request.path_params["request_id"])
        if explained is None:
            return JSONResponse({"error": {"message": "there is no such request"}}, status_code=404)
        return JSONResponse(explained)

    async def _workers(self, request: Request) -> Response:
        return JSONResponse(self.workers)

    async def _run(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append(Call(request.url.path, dict(request.headers), body))
        model = request.path_params["model"]
        if model == "busy" or (model == "busy-once" and len(self.calls) == 1):
            return _error(429, 3040, "Capacity temporarily exceeded, please try again.", {"retry-after": "0"})
        if model == "busy-for-long":
            return _error(429, 3040, "Capacity temporarily exceeded, please try again.", {"retry-after": "120"})
        if model == "missing":
            return _error(404, 3042, "no model missing here; served: @tandem/demo")
        if model == "locked":
            return _error(401, 10000, "Authentication error")
        if model == "proxy-page":
            return Response("<html>Bad Gateway</html>", status_code=502)
        if model == "cut" and not body.get("stream"):  # the server then closes the connection, as it would if it died
            return StreamingResponse(_cut(), headers={"content-length": "1000"}, media_type="application/json")
        if body.get("stream"):
            return StreamingResponse(_STREAMS.get(model, _tokens)(self, body), media_type="text/event-stream")
        return _envelope({"response": f"You said {body.get('prompt', body.get('messages'))}", "usage": USAGE})


def _envelope(result: Any) -> Response:
    return JSONResponse({"result": result, "success": True, "errors": [], "messages": []})


def _error(status: int, code: int, message: str, headers: dict[str, str] | None = None) -> Response:
    body = {"result": None, "success": False, "errors": [{"code": code, "message": message}], "messages": []}
    return JSONResponse(body, status_code=status, headers=headers)


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def last_event(body: Any) -> bytes:
    """Return the finish reason and the usage of an answer of three tokens."""
    reason = "length" if body.get("max_tokens") == USAGE["completion_tokens"] else "stop"
    return _event({"response": "", "finish_reason": reason, "usage": USAGE})


async def _cut() -> AsyncIterator[bytes]:
    yield b'{"result": '
    raise ConnectionAbortedError("the stub cuts this answer")


async def _tokens(gateway: StubGateway, body: Any) -> AsyncIterator[bytes]:
    for token in ("One", " two", " three"):
        yield _event({"response": token, "p": "abcdefgh"})
    yield last_event(body)
    yield b"data: [DONE]\n\n"


async def _echo(gateway: StubGateway, body: Any) -> AsyncIterator[bytes]:
    yield _event({"response": body["prompt"]})
    yield last_event(body)
    yield b"data: [DONE]\n\n"


SEAM = {"choice": 0, "position": 2, "from": "fp_0102", "to": "fp_0304"}


async def _crossing(gateway: StubGateway, body: Any) -> AsyncIterator[bytes]:
    """An answer that went on at a worker of another numerics class."""
    yield _event({"response": "One two three"})
    yield _event({"response": "", "finish_reason": "stop", "usage": USAGE, "seams": [SEAM]})
    yield b"data: [DONE]\n\n"


async def _calling(gateway: StubGateway, body: Any) -> AsyncIterator[bytes]:
    yield _event({"response": "I look."})
    calls = [{"index": 0, "name": "get", "arguments": {"city": "Oslo"}}, {"index": 1, "name": "put", "arguments": {}}]
    yield _event({"response": "", "tool_calls": calls})
    yield last_event(body)
    yield b"data: [DONE]\n\n"


async def _thinking(gateway: StubGateway, body: Any) -> AsyncIterator[bytes]:
    """A native chunk of thinking, then one of OpenAI's."""
    yield _event({"response": "", "reasoning_content": "One, "})
    yield _event({"choices": [{"index": 0, "delta": {"reasoning_content": "then two."}}]})
    async for event in _tokens(gateway, body):
        yield event


async def _calling_as_openai_does(gateway: StubGateway, body: Any) -> AsyncIterator[bytes]:
    def delta(**call: Any) -> bytes:
        return _event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})

    yield delta(index=0, id="call_1", type="function", function={"name": "get", "arguments": ""})
    yield delta(index=0, function={"arguments": '{"city": '})
    yield delta(index=0, function={"arguments": '"Oslo"}'})
    yield delta(index=1, id="call_2", type="function", function={"name": "put", "arguments": ""})
    yield delta(index=1, function={"arguments": '{"a": [1'})
    yield last_event(body)
    yield b"data: [DONE]\n\n"


async def _truncated(gateway: StubGateway, body: Any) -> AsyncIterator[bytes]:
    yield _event({"response": "One"})


async def _broken(gateway: StubGateway, body: Any) -> AsyncIterator[bytes]:
    yield _event({"response": "One"})
    raise ConnectionResetError("the stub drops the connection, as a gateway killed with -9 does")


async def _failing(gateway: StubGateway, body: Any) -> AsyncIterator[bytes]:
    yield _event({"response": "One"})
    yield _event({"errors": [{"code": 3040, "message": "Capacity temporarily exceeded"}], "success": False})


async def _endless(gateway: StubGateway, body: Any) -> AsyncIterator[bytes]:
    try:
        while True:
            yield _event({"response": "more "})
            await asyncio.sleep(0.001)  # the rate of decode; here the server also notices a disconnect
    finally:
        gateway.client_left.set()


async def _openai_shaped(gateway: StubGateway, body: Any) -> AsyncIterator[bytes]:
    for token in ("", "One", " two"):
        yield _event({"choices": [{"index": 0, "delta": {"content": token}}], "usage": {"completion_tokens": 1}})
    yield _event({"choices": [], "usage": {"completion_tokens": 0}})
    yield _event({"response": "", "usage": USAGE})
    yield b"data: [DONE]\n\n"


_STREAMS = {
    "crossing": _crossing,
    "echo": _echo,
    "truncated": _truncated,
    "broken": _broken,
    "failing": _failing,
    "endless": _endless,
    "openai-shaped": _openai_shaped,
    "calling": _calling,
    "calling-as-openai-does": _calling_as_openai_does,
    "thinking": _thinking,
}


@contextmanager
def stub_gateway() -> Iterator[StubGateway]:
    gateway = StubGateway()
    with serve(gateway.app()) as gateway.url:
        yield gateway
