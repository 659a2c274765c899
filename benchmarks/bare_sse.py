"""How fast are server-sent events with nothing behind them? A bare Starlette + sse-starlette app on uvicorn.

`python -m benchmarks.bare_sse PORT` answers every POST with constant events without end, one per turn of the event
loop: without that a stream would go on until its socket is full, and those behind it would have nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import uvicorn
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

EVENT = b'data: {"response":" constant","p":"abcdefghijklmnopqr"}\n\n'
"""As long as an average event of the gateway's."""


async def _events() -> AsyncIterator[bytes]:
    while True:
        yield EVENT
        await asyncio.sleep(0)


async def stream(request: Request) -> Response:
    return EventSourceResponse(_events(), ping=0)


def main() -> int:
    app = Starlette(routes=[Route("/", stream, methods=["POST"])])
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", lifespan="off", ws="none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
