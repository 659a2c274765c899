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

from control_plane.api.http.bounds import check_model_name
from control_plane.api.http.errors import HeaderMissing
from control_plane.api.workers_ai import search
from control_plane.api.workers_ai.routes import answer
from control_plane.text.prepared import TextJob
from tandem_runtime.errors import Unsupported

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
    return await answer(request, TextJob("binding", model), in_envelope=False)


async def run_on_websocket(request: Request) -> Response:
    """Refuse `AI.run` with the option `websocket`, which arrives as an upgrade request."""
    if request.headers.get("upgrade", "").lower() != "websocket":
        raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "POST"})
    raise Unsupported(
        "options.websocket is not supported here (a WebSocket as the answer); leave it out", field="options.websocket"
    )
