"""The endpoints /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from control_plane.api.http.body_reading import read_body
from control_plane.api.http.request_context import caller_of, services_of
from control_plane.api.http.sse import while_connected
from control_plane.api.openai.tokenization import parse
from control_plane.text.prepared import TextJob


def routes() -> list[Route]:
    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt or a chat: {count, max_model_len, tokens, token_strs}."""
    return await _convert(request, TextJob("tokenize"))


async def detokenize(request: Request) -> Response:
    """Return the text of token ids: {prompt}."""
    return await _convert(request, TextJob("detokenize"))


async def _convert(request: Request, job: TextJob) -> Response:
    converting = services_of(request).text.convert(job, await read_body(request), caller_of(request), parse)
    return Response(await while_connected(request, converting), media_type="application/json")
