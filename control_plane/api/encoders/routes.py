"""Serves /v1/embeddings and /v1/rerank, and answers runs of Workers AI's encoders."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from control_plane.api.encoders import embeddings, rerank
from control_plane.api.encoders.responses import written
from control_plane.api.http.body_reading import body_is_prepared, read_body
from control_plane.api.http.explained import Explained
from control_plane.api.http.request_context import caller_of, request_id_of, services_of
from control_plane.api.http.sse import while_connected
from control_plane.text.prepared import TextJob
from control_plane.text.text_service import Encoded, Parse

_MAX_WHOLE_BYTES = 1 << 18
"""Values of an answer that is written before its head is sent; a larger one is sent while it is written."""


def routes(prefix: str) -> list[Route]:
    """Return the endpoints under `prefix`, such as "/v1"."""
    return [
        Route(f"{prefix}/embeddings", create_embeddings, methods=["POST"]),
        Route(f"{prefix}/rerank", rank, methods=["POST"]),
    ]


async def create_embeddings(request: Request) -> Response:
    return await _answer(request, TextJob("embeddings"), embeddings.parse)


async def rank(request: Request) -> Response:
    return await _answer(request, TextJob("rerank"), rerank.parse)


COHERE_ROUTE = Route("/v2/rerank", rank, methods=["POST"])
"""Where Cohere's clients look."""


async def _answer(request: Request, job: TextJob, parse: Parse) -> Response:
    raw = await read_body(request)
    return await respond(request, await while_connected(request, _encoded(request, job, raw, parse)))


async def _encoded(request: Request, job: TextJob, raw: bytes, parse: Parse) -> Encoded:
    text = services_of(request).text
    prepared = await text.prepare_body(job, raw, caller_of(request), parse)
    del raw  # the wait for a worker may be long
    body_is_prepared(request)
    assert prepared.encoding is not None, "these bodies are for encoders"
    return await text.encode(prepared.encoding)


async def respond(request: Request, encoded: Encoded, before: bytes = b"", after: bytes = b"") -> Response:
    """Return the answer, between `before` and `after`."""
    pieces, explained = written(encoded, request_id_of(request)), Explained(request)
    if len(encoded.values) <= _MAX_WHOLE_BYTES:
        body = before + b"".join([piece async for piece in pieces]) + after
        return Response(explained.whole(body), media_type="application/json")

    async def all_pieces() -> AsyncIterator[bytes]:
        yield before
        async for piece in pieces:
            yield piece
        yield after

    return StreamingResponse(explained.pieces(all_pieces()), media_type="application/json")
