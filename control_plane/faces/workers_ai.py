"""How do Cloudflare's REST clients run a model and look for models?"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from control_plane.completion import TextStream
from control_plane.faces import model_search
from control_plane.faces.body import read_json_object
from control_plane.faces.services import caller_of, services_of
from control_plane.faces.streaming import EventStream, while_connected
from control_plane.faces.workers_ai_answers import frames, whole_result
from control_plane.faces.workers_ai_schema import TextGenerationBody, checked
from runtime.errors import InvalidRequest, Unsupported

_PREFIX = "/client/v4/accounts/{account}/ai"


def routes() -> list[Route]:
    return [
        Route(f"{_PREFIX}/run", run_named_in_body, methods=["POST"]),
        Route(f"{_PREFIX}/run/{{model:path}}", run, methods=["POST"]),
        Route(f"{_PREFIX}/models/search", model_search.search, methods=["GET"]),
    ]


async def run(request: Request) -> Response:
    """Run the model of the path; clients write it as it is or percent-encoded."""
    return await _run(request, request.path_params["model"], await read_json_object(request))


async def run_named_in_body(request: Request) -> Response:
    """Run `{"model": ..., "input": {...}}`."""
    body = await read_json_object(request)
    model = body.get("model")
    if not isinstance(model, str):
        raise InvalidRequest("model is missing; send it in the body or in the path", field="model")
    return await _run(request, model, body.get("input"))


async def _run(request: Request, model: str, inputs: Any) -> Response:
    if request.query_params.get("queueRequest") == "true":
        raise Unsupported(
            "queueRequest (asynchronous batches) is not supported here; leave it out", field="queueRequest"
        )
    body = checked(inputs)
    stream = await start(request, model, body, body.options)
    if body.stream:
        return EventStream(request, frames(stream), stream.aclose)
    async with aclosing(stream):
        result = await while_connected(request, whole_result(stream))
    envelope = {"result": result, "success": True, "errors": [], "messages": []}
    return Response(msgspec.json.encode(envelope), media_type="application/json")


async def start(request: Request, model: str, body: TextGenerationBody, options: dict[str, Any] | None) -> TextStream:
    """Start the generation that `body` asks for; the binding does the same."""
    services = services_of(request)

    async def find_and_start() -> TextStream:
        description = await services.catalog.get(model)
        return await services.text.start(body.for_model(description, caller_of(request, options)))

    return await while_connected(request, find_and_start(), discard=TextStream.aclose)
