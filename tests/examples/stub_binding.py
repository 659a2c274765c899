"""A stub of the gateway's binding endpoint, for tests of Cloudflare Workers.

It answers as stock workerd expects (docs: Workers AI wire facts, 1.4): results without an envelope, errors with
`internalCode`, and server-sent events. The model's name selects its behaviour.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

USAGE = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}


@dataclass
class StubBinding:
    """The received calls, and events of the caller of an endless answer."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    called: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    client_left: threading.Event = field(default_factory=threading.Event)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/run", self._run, methods=["POST"])])

    async def _run(self, request: Request) -> Response:
        body = await request.json()
        model = request.headers["cf-consn-model-id"]
        self.calls.append({"model": model, **body})
        self.called.set()
        headers = {"cf-ai-req-id": "req-1"}
        if model == "busy":
            return JSONResponse(_BUSY, status_code=429, headers=headers)
        if model == "slow-endless":
            await asyncio.to_thread(self.go_on.wait, 30)
        if not body["inputs"].get("stream"):
            inputs = body["inputs"]
            text = inputs["prompt"] if "prompt" in inputs else inputs["messages"][-1]["content"]
            return JSONResponse({"response": f"You said {text}", "usage": USAGE}, headers=headers)
        events = self._endless() if model.endswith("endless") else _tokens(broken=model == "broken")
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def _endless(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield _event({"response": "more ", "p": "abc"})
                await asyncio.sleep(0.001)  # the rate of decode; here the server also notices a disconnect
        finally:
            self.client_left.set()


_BUSY = {
    "internalCode": 3040,
    "name": "InferenceUpstreamError",
    "message": "out of capacity",
    "description": "Capacity temporarily exceeded, please try again.",
}


async def _tokens(broken: bool) -> AsyncIterator[bytes]:
    for token in ("One", " two", " three"):
        yield _event({"response": token, "p": "abcdefgh"})
    if broken:
        raise ConnectionResetError("the stub drops the connection without [DONE]")
    yield _event({"response": "", "usage": USAGE})
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
