"""How does a Worker's `env.AI`, inside an unmodified workerd, talk to Tandem?

workerd turns `env.AI.run(model, inputs, options)` into `POST /run` with the model in a header; see
cloudflare/workerd `src/cloudflare/internal/ai-api.ts`.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from control_plane.faces import model_search
from control_plane.faces.body import read_json_object
from control_plane.faces.streaming import EventStream, while_connected
from control_plane.faces.workers_ai import start
from control_plane.faces.workers_ai_answers import frames, whole_result
from control_plane.faces.workers_ai_schema import checked
from runtime.errors import InvalidRequest, Unsupported

_MODEL_HEADER = "cf-consn-model-id"


def routes() -> list[Route]:
    return [
        Route("/run", run, methods=["POST"]),
        Route("/ai-gateway/run", run, methods=["POST"]),
        Route("/ai-api/models/search", model_search.search, methods=["GET"]),
    ]


async def run(request: Request) -> Response:
    """Answer `AI.run`: the bare result, or the native stream."""
    model = request.headers.get(_MODEL_HEADER)
    if not model:
        raise InvalidRequest(f"the header {_MODEL_HEADER} is missing; it names the model", field=_MODEL_HEADER)
    call = await read_json_object(request)
    options = _options(call)
    body = checked(call.get("inputs"))
    stream = await start(request, model, body, options)
    if body.stream:
        return EventStream(request, frames(stream), stream.aclose)
    async with aclosing(stream):
        result = await while_connected(request, whole_result(stream))
    # Exactly this type: with a charset, workerd gives the Worker a stream of bytes instead of an object.
    return Response(msgspec.json.encode(result), media_type="application/json")


def _options(call: dict[str, Any]) -> dict[str, Any]:
    options = call.get("options") or {}
    if not isinstance(options, dict):
        raise InvalidRequest("options must be an object", field="options")
    for name in ("queueRequest", "websocket"):
        if options.get(name):
            raise Unsupported(f"the option {name} is not supported here; leave it out", field=f"options.{name}")
    return options
