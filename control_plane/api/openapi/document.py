"""What is in the OpenAPI document?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from control_plane.api.http.body import Body
from control_plane.api.openai import objects as openai_objects
from control_plane.api.openai.schema import ChatBody, CompletionBody
from control_plane.api.openapi.operation import REFERENCE, reference
from control_plane.api.openapi.operations import TAGS, operations
from control_plane.api.workers_ai import objects as workers_ai_objects
from control_plane.api.workers_ai.schema import TextGenerationBody

VERSION = "1.0"
_BODIES: tuple[type[Body], ...] = (ChatBody, CompletionBody, TextGenerationBody)
_ANSWERS: tuple[Any, ...] = (
    openai_objects.ChatCompletion,
    openai_objects.ChatChunk,
    openai_objects.Completion,
    openai_objects.ModelList,
    openai_objects.WorkerList,
    openai_objects.ErrorBody,
    workers_ai_objects.NativeResult,
    workers_ai_objects.NativeEvent,
    workers_ai_objects.FoundModels,
    workers_ai_objects.FoundTasks,
    workers_ai_objects.FoundAuthors,
    workers_ai_objects.FoundSchemas,
    workers_ai_objects.ErrorEnvelope,
    workers_ai_objects.BindingError,
)


class _Untitled(GenerateJsonSchema):
    """Leaves out titles that only repeat the field's name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def document(url: str, models: Sequence[str] = ()) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server at `url`, with examples that ask the first of `models`."""
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
    """Return every named schema: bodies from their validation models, answers from the types they are made as."""
    bodies = models_json_schema(
        [(body, "validation") for body in _BODIES],
        ref_template=REFERENCE.format("{model}"),
        schema_generator=_Untitled,
    )[1]["$defs"]
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template=REFERENCE.format("{name}"))
    event = {
        "description": "Of a model's stream, by its wire format; the last one is a NativeEvent.",
        "anyOf": [reference(name) for name in ("NativeEvent", "ChatChunk", "Completion")],
    }
    return {**bodies, **answers, "StreamEvent": event}
