"""REST endpoints of Workers AI: run a model, find models, tasks and authors."""

from __future__ import annotations

from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from control_plane.api.encoders import routes as encoders
from control_plane.api.http.body_reading import body_is_prepared, read_text_body
from control_plane.api.http.bounds import check_model_name
from control_plane.api.http.explained import Explained
from control_plane.api.http.request_context import caller_of, request_id_of, services_of
from control_plane.api.http.sse import EventStream, while_connected
from control_plane.api.workers_ai import search
from control_plane.api.workers_ai.bodies import parse
from control_plane.api.workers_ai.responses import wire_of
from control_plane.text.prepared import AnswerForm, TextJob
from control_plane.text.text_service import Encoded
from control_plane.text.text_stream import TextStream

_ENVELOPE = b'{"result":', b',"success":true,"errors":[],"messages":[]}'
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
    model = request.path_params["model"]
    check_model_name(model)
    return await answer(request, TextJob("run", model, _query(request)), in_envelope=True)


async def run_named_in_body(request: Request) -> Response:
    """Run `{"model": ..., "input": {...}}`; options are in the query or in the input."""
    return await answer(request, TextJob("run_named_in_body", query=_query(request)), in_envelope=True)


def _query(request: Request) -> tuple[tuple[str, str], ...]:
    return tuple(request.query_params.items())


async def answer(request: Request, job: TextJob, *, in_envelope: bool) -> Response:
    """Run a model and answer in its wire format, whole or streamed; REST adds an envelope, the binding does not."""
    starting = _started(request, job, await read_text_body(request, job))
    started = await while_connected(request, starting, discard=_close)
    if isinstance(started, Encoded):
        envelope = _ENVELOPE if in_envelope else (b"", b"")
        return await encoders.respond(request, started, *envelope)
    form, stream = started
    wire = wire_of(stream.model, form, request_id_of(request))
    if form.stream:
        return EventStream(request, wire.frames(stream, Explained(request)), stream.aclose)
    async with aclosing(stream):
        result = await while_connected(request, wire.result(stream))
    if in_envelope:
        result = {"result": result, "success": True, "errors": [], "messages": []}
    # Without a charset: with one, workerd gives the Cloudflare Worker a stream of bytes instead of an object.
    return Response(Explained(request).whole(msgspec.json.encode(result)), media_type="application/json")


async def _started(request: Request, job: TextJob, raw: bytes) -> tuple[AnswerForm, TextStream] | Encoded:
    text = services_of(request).text
    prepared = await text.prepare_body(job, raw, caller_of(request), parse)
    del raw  # the wait for a worker may be long
    body_is_prepared(request)
    if prepared.encoding is not None:
        return await text.encode(prepared.encoding)
    (prompt,) = prepared.prompts
    return prepared.form, await text.start_prepared(prompt)


async def _close(started: tuple[AnswerForm, TextStream] | Encoded) -> None:
    if not isinstance(started, Encoded):
        await started[1].aclose()
