"""Builds the OpenAPI document, and serves the document and its reference page."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from control_plane.api.encoders import responses as encoder_responses
from control_plane.api.encoders.embeddings import EmbeddingsBody
from control_plane.api.encoders.native import EncoderInputs
from control_plane.api.encoders.rerank import RerankBody
from control_plane.api.explanation_objects import ExplanationObject, RequestList
from control_plane.api.http.body import Body
from control_plane.api.http.request_context import served_models
from control_plane.api.openai import responses as openai_responses
from control_plane.api.openai.schema import ChatBody, CompletionBody
from control_plane.api.openai.tokenization import DetokenizeBody, Detokenized, TokenizeBody, Tokenized
from control_plane.api.openapi.operations import REFERENCE, TAGS, operations, reference
from control_plane.api.openapi.page import reference_page
from control_plane.api.workers_ai import responses as workers_ai_responses
from control_plane.api.workers_ai.schema import TextGenerationBody

VERSION = "1.0"
_BODIES: tuple[type[Body], ...] = (
    ChatBody,
    CompletionBody,
    TextGenerationBody,
    TokenizeBody,
    DetokenizeBody,
    EmbeddingsBody,
    RerankBody,
    EncoderInputs,
)
_ANSWERS: tuple[Any, ...] = (
    openai_responses.ChatCompletion,
    openai_responses.ChatChunk,
    openai_responses.Completion,
    openai_responses.ModelList,
    openai_responses.WorkerList,
    openai_responses.ErrorBody,
    Tokenized,
    Detokenized,
    *encoder_responses.ANSWERS,
    workers_ai_responses.NativeResult,
    workers_ai_responses.NativeEvent,
    workers_ai_responses.FoundModels,
    workers_ai_responses.FoundTasks,
    workers_ai_responses.FoundAuthors,
    workers_ai_responses.FoundSchemas,
    workers_ai_responses.ErrorEnvelope,
    workers_ai_responses.BindingError,
    RequestList,
    ExplanationObject,
)


def routes() -> list[Route]:
    return [
        Route("/openapi.json", openapi_json, methods=["GET"]),
        Route("/docs", reference_html, methods=["GET"]),
    ]


async def openapi_json(request: Request) -> Response:
    url, models = str(request.base_url).rstrip("/"), tuple(served_models(request))
    return Response(await asyncio.to_thread(_encoded, url, models), media_type="application/json")


async def reference_html(request: Request) -> Response:
    url, models = str(request.base_url).rstrip("/"), tuple(served_models(request))
    return HTMLResponse(await asyncio.to_thread(_page, url, models))


@lru_cache(maxsize=16)
def _encoded(url: str, models: Sequence[str]) -> bytes:
    """Return the document as JSON, made once for all who ask for it by that name; it takes some 30 ms."""
    return msgspec.json.encode(document(url, models))


@lru_cache(maxsize=16)
def _page(url: str, models: Sequence[str]) -> str:
    return reference_page(document(url, models))


class _Untitled(GenerateJsonSchema):
    """Omits titles that only repeat the field's name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def document(url: str, models: Sequence[str] = ()) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server at `url`. Its examples use the first of `models`."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations(models[0] if models else "@tandem/demo"):
        paths.setdefault(operation.path, {})[operation.method] = operation.as_json()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": VERSION,
            "description": "Language models with prefill and decode on separate machines: OpenAI's API, Workers AI's "
            "REST and its binding. Fields that are null count as absent; fields that are not listed are refused.",
        },
        "servers": [{"url": url}],
        "security": [{}, {"token": []}],
        "tags": [{"name": name, "description": description} for name, description in TAGS.items()],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas(),
        },
    }


@lru_cache(maxsize=1)
def schemas() -> dict[str, Any]:
    """Return all named schemas: of bodies from their pydantic models, of answers from their TypedDicts."""
    bodies = models_json_schema(
        [(body, "validation") for body in _BODIES],
        ref_template=REFERENCE.format("{model}"),
        schema_generator=_Untitled,
    )[1]["$defs"]
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template=REFERENCE.format("{name}"))
    event = {
        "description": "An event of a model's stream, in the model's wire format. The last event is a NativeEvent.",
        "anyOf": [reference(name) for name in ("NativeEvent", "ChatChunk", "Completion")],
    }
    return {**bodies, **answers, "StreamEvent": event}
