"""The baseline of server-sent events: a bare Starlette + sse-starlette app on uvicorn.

`python -m benchmarks.gateway.bare_sse PORT` answers every POST with endless constant events, one per turn of the event
loop. Without the turn, one stream would fill its socket while the others wait.
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
