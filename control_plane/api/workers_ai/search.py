"""Lists served models, their tasks, authors and JSON Schemas, as Cloudflare's clients ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from control_plane.accounts.prices import Price
from control_plane.api.encoders.native import EncoderInputs
from control_plane.api.encoders.responses import NativeClass, NativeEmbeddings, NativeScores
from control_plane.api.http.bounds import MAX_PER_PAGE
from control_plane.api.http.paging import number
from control_plane.api.http.request_context import services_of
from control_plane.api.openai.responses import ChatCompletion, Completion
from control_plane.api.workers_ai.responses import (
    FoundModel,
    FoundSchemas,
    ModelProperty,
    NativeResult,
    Schemas,
    Task,
    UnitPrice,
)
from control_plane.api.workers_ai.schema import TextGenerationBody
from control_plane.generation import ModelDescription, ModelTask
from tandem_runtime.errors import InvalidRequest, Unsupported

TEXT_GENERATION: Task = {
    "id": "c329a1f9-323d-4e91-b2aa-582dd4188d34",
    "name": "Text Generation",
    "description": "Family of generative text models, such as large language models (LLM), that can be adapted for a "
    "variety of natural language tasks.",
}
TEXT_EMBEDDINGS: Task = {
    "id": "0137cdcf-162a-4108-94f2-1ca59e8c65ee",
    "name": "Text Embeddings",
    "description": "Feature extraction models transform raw data into numerical features that can be processed while "
    "preserving the information in the original dataset.",
}
TEXT_CLASSIFICATION: Task = {
    "id": "19606750-23ed-4371-aab2-c20349b53a60",
    "name": "Text Classification",
    "description": "Sentiment analysis or text classification is a common NLP task that classifies a text input into "
    "labels or classes; models that rank texts are here, too.",
}
TASKS: Mapping[ModelTask, Task] = {
    "text-generation": TEXT_GENERATION,
    "text-embedding": TEXT_EMBEDDINGS,
    "text-classification": TEXT_CLASSIFICATION,
    "text-ranking": TEXT_CLASSIFICATION,
}
MAX_PAGE = 10**9
_SOURCE = 1
_PAGING = {"page", "per_page"}
_FLAGS = {"hide_experimental", "include_deprecated"}
"""Accepted without effect: no model here is experimental or deprecated."""
_FILTERS = {"search", "author", "task", "source", "format"}


async def search(request: Request) -> Response:
    """Answer a page of the models that match the query. Pages past the end are empty, which ends a client's paging."""
    _check_names(request, _PAGING | _FLAGS | _FILTERS)
    for name in _FLAGS:
        if request.query_params.get(name, "").lower() not in ("", "true", "false"):
            raise InvalidRequest(f"{name} is {request.query_params[name]!r}, must be true or false", field=name)
    if request.query_params.get("format"):
        raise Unsupported(
            "format is not supported here: models are listed in Cloudflare's format; leave it out", field="format"
        )
    if request.query_params.get("source"):
        number(request, "source", default=_SOURCE, highest=MAX_PAGE)
    services = services_of(request)
    found = [model for model in services.catalog.list() if _fits(model, request)]
    return _page(request, [_model_json(model, services.price_of) for model in found])


async def tasks(request: Request) -> Response:
    _check_names(request, _PAGING)
    return _page(request, [TEXT_GENERATION, TEXT_EMBEDDINGS, TEXT_CLASSIFICATION])


async def authors(request: Request) -> Response:
    """Answer the authors of the models, read from the models' names."""
    _check_names(request, _PAGING)
    found = sorted({author_of(model.model_id) for model in services_of(request).catalog.list()} - {""})
    return _page(request, [{"name": author} for author in found])


def author_of(model_id: str) -> str:
    """Return "meta" of "@cf/meta/llama-3.1-8b-instruct", "tandem" of "@tandem/demo", "" of a name without an author."""
    before, slash, _ = model_id.removeprefix("@cf/").rpartition("/")
    return before.split("/")[0].removeprefix("@") if slash else ""


def _page(request: Request, found: Sequence[Any]) -> Response:
    page = number(request, "page", default=1, highest=MAX_PAGE)
    per_page = number(request, "per_page", default=50, highest=MAX_PER_PAGE)
    shown = list(found[(page - 1) * per_page : page * per_page])
    paging = {"page": page, "per_page": per_page, "count": len(shown), "total_count": len(found)}
    return JSONResponse({"result": shown, "success": True, "errors": [], "messages": [], "result_info": paging})


def _check_names(request: Request, known: set[str]) -> None:
    for name in request.query_params:
        if name not in known:
            raise InvalidRequest(
                f"{name} is not a parameter of this endpoint; it has {', '.join(sorted(known))}", field=name
            )


def _fits(model: ModelDescription, request: Request) -> bool:
    query = {name: text.lower() for name, text in request.query_params.items()}
    names = (model.model_id, *model.aliases)
    return (
        any(query.get("search", "") in name.lower() for name in names)
        and query.get("author", "") in ("", author_of(model.model_id).lower())
        and query.get("task", "") in ("", TASKS[model.task]["name"].lower(), TASKS[model.task]["id"])
        and query.get("source", "") in ("", str(_SOURCE))
    )


def _model_json(model: ModelDescription, price_of: Callable[[str], Price] | None) -> FoundModel:
    created = datetime.fromtimestamp(model.created_unix_seconds, UTC)
    properties: list[ModelProperty] = [
        {"property_id": "context_window", "value": str(model.context_length)},
        {"property_id": "architecture", "value": model.architecture},
    ]
    if model.chat_template:
        properties.append({"property_id": "function_calling", "value": "true"})
    if price_of is not None:
        properties.append({"property_id": "price", "value": _price_json(price_of(model.model_id))})
    return {
        "id": str(uuid5(NAMESPACE_URL, model.model_id)),
        "source": _SOURCE,
        "name": model.model_id,
        "description": f"{model.architecture} with {model.num_parameters:,} parameters",
        "task": TASKS[model.task],
        "tags": [],
        "properties": properties,
        "created_at": created.strftime("%Y-%m-%d %H:%M:%S.000"),
    }


def _price_json(price: Price) -> list[UnitPrice]:
    units = {"input": price.input, "output": price.output, "cached input": price.cached_input}
    return [{"unit": f"per M {unit} tokens", "price": each, "currency": "USD"} for unit, each in units.items()]


async def schema(request: Request) -> Response:
    """Answer the JSON Schemas of the inputs and outputs of the model in the query."""
    name = request.query_params.get("model")
    if not name:
        raise InvalidRequest("the query parameter model is missing; send the model's name", field="model")
    found: FoundSchemas = {
        "result": schemas_of(await services_of(request).catalog.get(name)),
        "success": True,
        "errors": [],
        "messages": [],
    }
    return JSONResponse(found)


def schemas_of(model: ModelDescription) -> Schemas:
    if model.task != "text-generation":
        return _encoder_schemas(model.task)
    complete: tuple[Any, ...] = (NativeResult,) if model.wire_format == "native" else (ChatCompletion, Completion)
    answers, definitions = msgspec.json.schema_components(complete, ref_template="#/$defs/{name}")
    streamed = {"type": "string", "contentMediaType": "text/event-stream", "description": "With stream: true."}
    return {
        "input": TextGenerationBody.model_json_schema(),
        "output": {"oneOf": [*answers, streamed], "$defs": definitions},
    }


_ENCODER_RESULTS: Mapping[ModelTask, tuple[Any, ...]] = {
    "text-embedding": (NativeEmbeddings, NativeScores),
    "text-classification": (list[NativeClass],),
    "text-ranking": (NativeScores,),
}


def _encoder_schemas(task: ModelTask) -> Schemas:
    answers, definitions = msgspec.json.schema_components(_ENCODER_RESULTS[task], ref_template="#/$defs/{name}")
    return {
        "input": EncoderInputs.model_json_schema(),
        "output": {"oneOf": list(answers), "$defs": definitions},
    }
