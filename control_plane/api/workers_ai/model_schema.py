"""Which JSON Schemas do a model's inputs and outputs have?"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from control_plane.api.openai.objects import ChatCompletion, Completion
from control_plane.api.services import services_of
from control_plane.api.workers_ai.objects import FoundSchemas, NativeResult, Schemas
from control_plane.api.workers_ai.schema import TextGenerationBody
from control_plane.generation import ModelDescription
from tandem_runtime.errors import InvalidRequest


async def schema(request: Request) -> Response:
    """Answer the schemas of the model that the query names."""
    name = request.query_params.get("model")
    if not name:
        raise InvalidRequest("the query parameter model is missing; it names the model", field="model")
    found: FoundSchemas = {
        "result": schemas_of(await services_of(request).catalog.get(name)),
        "success": True,
        "errors": [],
        "messages": [],
    }
    return JSONResponse(found)


def schemas_of(model: ModelDescription) -> Schemas:
    whole: tuple[Any, ...] = (NativeResult,) if model.wire_format == "native" else (ChatCompletion, Completion)
    answers, definitions = msgspec.json.schema_components(whole, ref_template="#/$defs/{name}")
    streamed = {"type": "string", "contentMediaType": "text/event-stream", "description": "With stream: true."}
    return {
        "input": TextGenerationBody.model_json_schema(),
        "output": {"oneOf": [*answers, streamed], "$defs": definitions},
    }
