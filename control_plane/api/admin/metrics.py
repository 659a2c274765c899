"""Endpoints for Prometheus: the metrics of this gateway, and where those of the workers and KV services are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from control_plane.api.http.request_context import services_of
from tandem_runtime.metrics import pieces
from tandem_runtime.metrics_endpoint import accepts_gzip, reading
from tandem_runtime.prometheus_text import CONTENT_TYPE


def routes() -> list[Route]:
    return [
        Route("/metrics", read_metrics, methods=["GET"]),
        Route("/v1/metrics/targets", targets, methods=["GET"]),
    ]


async def read_metrics(request: Request) -> Response:
    """Answer the metrics of this process, read in a thread, and written in one turn of the loop for each piece."""
    headers = {"Content-Type": CONTENT_TYPE, "Vary": "Accept-Encoding"}
    is_packed = accepts_gzip(request.headers.get("accept-encoding", ""))
    body = await reading(pieces, is_packed=is_packed)
    headers["Content-Length"] = str(sum(map(len, body)))
    if is_packed:
        headers["Content-Encoding"] = "gzip"
    return StreamingResponse(_in_turns(body), headers=headers)


async def targets(request: Request) -> Response:
    return JSONResponse(services_of(request).fleet.metrics_targets())


async def _in_turns(body: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in body:
        yield piece
        await asyncio.sleep(0)
