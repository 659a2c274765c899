"""A proxy between a tool and Tandem that notes which endpoints the tool calls, and with which fields."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
_METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]


class Recorder:
    """`calls` counts method, path and status; `fields` has the paths of the fields of each endpoint's bodies."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = httpx.AsyncClient(trust_env=False, timeout=600.0)
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.fields: dict[str, set[str]] = {}
        self.refusals: Counter[str] = Counter()
        """Method, path, status and message of answers with 400 and above."""
        self.absent: Counter[str] = Counter()
        """Paths that a tool looked for by GET or HEAD and that are not there: the tool goes on without them."""
        self.app = Starlette(routes=[Route("/{path:path}", self._forward, methods=_METHODS)])

    def config(self) -> uvicorn.Config:
        return uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="warning", access_log=False)

    async def _forward(self, request: Request) -> Response:
        body = await request.body()
        path = request.url.path
        if body:
            self.fields.setdefault(path, set()).update(_fields_of(body))
        headers = {name: value for name, value in request.headers.items() if name not in _HOP_BY_HOP}
        url = f"{self._url}{path}" + (f"?{request.url.query}" if request.url.query else "")
        sent = self._client.build_request(request.method, url, content=body, headers=headers)
        answer = await self._client.send(sent, stream=True)
        self.calls[request.method, path, answer.status_code] += 1
        if answer.status_code >= 400:
            said = (await answer.aread()).decode(errors="replace")[:300]
            if request.method in ("GET", "HEAD") and answer.status_code == 404:
                self.absent[path] += 1
            else:
                self.refusals[f"{request.method} {path}: {answer.status_code} {said}"] += 1
            return Response(answer.content, answer.status_code, _kept(answer))
        return StreamingResponse(_pieces(answer), answer.status_code, _kept(answer))


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


def _kept(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name not in _HOP_BY_HOP}


def _fields_of(body: bytes) -> set[str]:
    try:
        value = json.loads(body)
    except ValueError:
        return set()
    return set(_paths(value, ""))


def _paths(value: Any, at: str) -> set[str]:
    """Return the paths of a value's fields, such as messages[].content; those of schemas and arguments end early."""
    if isinstance(value, dict):
        found: set[str] = set()
        for name, inner in value.items():
            path = f"{at}.{name}" if at else name
            found.add(path)
            if name not in ("parameters", "schema", "metadata", "chat_template_kwargs", "extra_body"):
                found |= _paths(inner, path)
        return found
    if isinstance(value, list):
        return {path for item in value for path in _paths(item, f"{at}[]")}
    return set()
