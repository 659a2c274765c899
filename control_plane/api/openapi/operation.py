"""What is known of one endpoint, and how does OpenAPI say it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane.api.http.errors import Face

REFERENCE = "#/components/schemas/{}"
JSON = "application/json"
EVENTS = "text/event-stream"

_ERROR_OF: Mapping[Face, str] = {"openai": "ErrorBody", "cloudflare": "ErrorEnvelope", "binding": "BindingError"}
_REASONS = {
    "400": "The request is wrong, or asks for what is not supported: the message says which field and what to do.",
    "401": "The token is missing or not valid.",
    "403": "The token may not do this.",
    "404": "There is no such model or no such path.",
    "405": "Adapters (lora) are not supported.",
    "408": "The request took longer than its deadline.",
    "413": "The body is too large.",
    "429": "Out of capacity, or over a limit; Retry-After says when to try again.",
    "500": "Something broke here.",
    "503": "Nobody can answer just now; Retry-After says when to try again.",
}
_GENERATION_ERRORS: Mapping[Face, tuple[str, ...]] = {
    "openai": ("400", "401", "403", "404", "408", "413", "429", "500", "503"),
    "cloudflare": ("400", "401", "403", "404", "405", "408", "413", "429", "500", "503"),
    "binding": ("400", "401", "403", "404", "405", "408", "413", "429", "500", "503"),
}
_READ_ERRORS = ("400", "401", "403", "404", "500", "503")
_REQUEST_ID = {"cf-ai-req-id": {"description": "The request's id, also in the logs.", "schema": {"type": "string"}}}


def reference(name: str) -> dict[str, Any]:
    return {"$ref": REFERENCE.format(name)}


def event_stream(event: str) -> dict[str, Any]:
    """Return the schema of one server-sent event whose data is the JSON of the schema named `event`."""
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": reference(event)}
    note = f"With `stream: true`, server-sent events: each `data:` is a {event}, the last one [DONE]."
    last = {"type": "string", "const": "[DONE]"}
    return {
        "type": "object",
        "description": note,
        "properties": {"data": {"anyOf": [data, last]}},
        "required": ["data"],
    }


@dataclass(frozen=True)
class Parameter:
    """Where it stands ("path", "query", "header"), and what it may be."""

    name: str
    place: str
    schema: Mapping[str, Any]
    description: str
    is_required: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "in": self.place,
            "required": self.is_required or self.place == "path",
            "description": self.description,
            "schema": dict(self.schema),
        }


@dataclass(frozen=True)
class Operation:
    """One method of one path; `answer` and `event` name schemas, of a whole answer and of a stream's events."""

    method: str
    path: str
    tag: str
    name: str
    summary: str
    face: Face = "openai"
    body: Mapping[str, Any] | None = None
    answer: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    media_type: str = JSON
    event: str = ""
    parameters: Sequence[Parameter] = ()
    example: Mapping[str, Any] | None = None
    errors: Sequence[str] | None = None
    """Statuses; None: what any endpoint of that kind may answer."""
    error: Mapping[str, Any] | None = None
    """The errors' schema; None: the face's."""

    def as_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {"operationId": self.name, "tags": [self.tag], "summary": self.summary}
        if self.parameters:
            said["parameters"] = [parameter.as_json() for parameter in self.parameters]
        if self.body is not None:
            content = {"schema": dict(self.body), **({"example": dict(self.example)} if self.example else {})}
            said["requestBody"] = {"required": True, "content": {JSON: content}}
        said["responses"] = self._responses()
        return said

    def _responses(self) -> dict[str, Any]:
        content: dict[str, Any] = {self.media_type: {"schema": dict(self.answer)}}
        if self.event:
            content[EVENTS] = {"schema": event_stream(self.event)}
        responses = {"200": {"description": "The answer.", "headers": _REQUEST_ID, "content": content}}
        return responses | {status: self._error(status) for status in self._statuses()}

    def _statuses(self) -> Sequence[str]:
        if self.errors is not None:
            return self.errors
        return _GENERATION_ERRORS[self.face] if self.body is not None else _READ_ERRORS

    def _error(self, status: str) -> dict[str, Any]:
        error = {"schema": dict(self.error or reference(_ERROR_OF[self.face]))}
        return {"description": _REASONS[status], "headers": _REQUEST_ID, "content": {JSON: error}}
