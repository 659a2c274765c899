"""REST endpoints of Workers AI: run a model, find models, tasks and authors."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from control_plane.api.generation_fields import RunOptions, caller_with
from control_plane.api.http.body import read_json_object
from control_plane.api.http.request_context import check_model_name, request_id_of, services_of
from control_plane.api.http.sse import EventStream, while_connected
from control_plane.api.workers_ai import search
from control_plane.api.workers_ai.responses import wire_of
from control_plane.api.workers_ai.schema import TextGenerationBody, checked, options_in_query
from control_plane.text.text_service import TextStream
from tandem_runtime.errors import InvalidRequest

_PREFIX = "/client/v4/accounts/{account}/ai"


def routes() -> list[Route]:
    return [
        Route(f"{_PREFIX}/run", run_named_in_body, methods=["POST"]),
        Route(f"{_PREFIX}/run/{{model:path}}", run, methods=["POST"]),
        Route(f"{_PREFIX}/models/search", search.search, methods=["GET"]),
        Route(f"{_PREFIX}/models/schema", search.schema, methods=["GET"]),
        Route(f"{_PREFIX}/tasks/search", search.tasks, methods=["GET"]),
        Route(f"{_PREFIX}/authors/search", search.authors, methods=["GET"]),
    ]


async def run(request: Request) -> Response:
    """Run the model that the path names; the name may be percent-encoded."""
    return await _run(request, request.path_params["model"], await read_json_object(request))


async def run_named_in_body(request: Request) -> Response:
    """Run `{"model": ..., "input": {...}}`; options are in the query or in the input."""
    body = await read_json_object(request)
    model = body.get("model")
    if not isinstance(model, str):
        raise InvalidRequest("model is missing; send it in the body or in the path", field="model")
    unknown = sorted(set(body) - {"model", "input"})
    if unknown:
        raise InvalidRequest(
            f"{unknown[0]} is not a field of this request, which has model and input; move it into input",
            field=unknown[0],
        )
    return await _run(request, model, body.get("input"))


async def _run(request: Request, model: str, inputs: Any) -> Response:
    check_model_name(model)
    options = options_in_query(request.query_params)
    return await answer(request, model, checked(inputs), options, in_envelope=True)


async def answer(
    request: Request, model: str, body: TextGenerationBody, options: RunOptions, *, in_envelope: bool
) -> Response:
    """Run a model and answer in its wire format, whole or streamed; REST adds an envelope, the binding does not."""
    stream = await while_connected(request, _start(request, model, body, options), discard=TextStream.aclose)
    wire = wire_of(stream.model, body, request_id_of(request))
    if body.stream:
        return EventStream(request, wire.frames(stream), stream.aclose)
    async with aclosing(stream):
        result = await while_connected(request, wire.result(stream))
    if in_envelope:
        result = {"result": result, "success": True, "errors": [], "messages": []}
    # Without a charset: with one, workerd gives the Cloudflare Worker a stream of bytes instead of an object.
    return Response(msgspec.json.encode(result), media_type="application/json")


async def _start(request: Request, model: str, body: TextGenerationBody, options: RunOptions) -> TextStream:
    services = services_of(request)
    description = await services.catalog.get(model)
    text_request = body.for_model(description, caller_with(request, body.options, options))
    return await services.text.start(replace(text_request, model=model))
