"""Serves `env.AI` of a Cloudflare Worker inside an unmodified workerd.

workerd turns `env.AI.run(model, inputs, options)` into `POST /run` with the model in a header; see
cloudflare/workerd `src/cloudflare/internal/ai-api.ts`.
"""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from control_plane.api.http.body import read_json_object
from control_plane.api.http.errors import HeaderMissing
from control_plane.api.http.request_context import check_model_name
from control_plane.api.workers_ai import search
from control_plane.api.workers_ai.routes import answer
from control_plane.api.workers_ai.schema import checked, options_of
from tandem_runtime.errors import InvalidRequest, Unsupported

MODEL_HEADER = "cf-consn-model-id"


def routes() -> list[Route]:
    return [
        Route("/run", run, methods=["POST"]),
        Route("/run", run_on_websocket, methods=["GET"]),
        Route("/ai-gateway/run", run, methods=["POST"]),
        Route("/ai-api/models/search", search.search, methods=["GET"]),
    ]


async def run(request: Request) -> Response:
    """Answer `AI.run` with the result, without an envelope, or with a stream."""
    if "userInputs" in request.query_params:
        raise Unsupported(
            "streams as inputs (audio, images, forms) are not supported here: the models take text; "
            'send inputs such as {"prompt": "..."}',
            field="inputs",
        )
    model = request.headers.get(MODEL_HEADER)
    if not model:
        raise HeaderMissing(f"the header {MODEL_HEADER} is missing; it names the model", field=MODEL_HEADER)
    check_model_name(model)
    call = await read_json_object(request)
    unknown = sorted(set(call) - {"inputs", "options"})
    if unknown:
        raise InvalidRequest(
            f"{unknown[0]} is not a field of this request, which has inputs and options; move it into inputs",
            field=unknown[0],
        )
    options, body = options_of(call.get("options")), checked(call.get("inputs"))
    return await answer(request, model, body, options, in_envelope=False)


async def run_on_websocket(request: Request) -> Response:
    """Refuse `AI.run` with the option `websocket`, which arrives as an upgrade request."""
    if request.headers.get("upgrade", "").lower() != "websocket":
        raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "POST"})
    raise Unsupported(
        "options.websocket is not supported here (a WebSocket as the answer); leave it out", field="options.websocket"
    )
