"""Describes each endpoint: its parameters, body, answers and errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane.admission.service_classes import HEADER_TIERS
from control_plane.api.admin.rolls import MAX_ROLL_NAME_CHARACTERS, MAX_ROLL_REASON_CHARACTERS, MAX_ROLL_WORKERS
from control_plane.api.http.bounds import (
    MAX_ACCOUNT_CHARACTERS,
    MAX_PER_PAGE,
    MAX_SESSION_CHARACTERS,
)
from control_plane.api.http.errors import ErrorFormat
from control_plane.api.http.request_context import EXPLAIN_HEADER, SERVICE_TIER_HEADER
from control_plane.api.requests import MAX_LISTED, STATES
from control_plane.api.workers_ai.binding import MODEL_HEADER
from control_plane.api.workers_ai.remote_proxy import PATH as PROXY_PATH
from control_plane.api.workers_ai.search import MAX_PAGE
from control_plane.events.kinds import KINDS, SEVERITIES
from control_plane.events.store import MAX_PAGE as MAX_PAGE_OF_EVENTS

REFERENCE = "#/components/schemas/{}"
JSON = "application/json"
EVENTS = "text/event-stream"

_ERROR_OF: Mapping[ErrorFormat, str] = {"openai": "ErrorBody", "cloudflare": "ErrorEnvelope", "binding": "BindingError"}
_REASONS = {
    "400": "The request is invalid or not supported. The message names the field and the remedy.",
    "401": "The token is missing or not valid.",
    "403": "The token does not permit this request.",
    "404": "The model or the path does not exist.",
    "405": "The route takes another method.",
    "408": "The body came too slowly. Outside /v1 also: the request took longer than its deadline.",
    "413": "The body is too large.",
    "414": "The URL is too long.",
    "431": "The head is too large.",
    "429": "All workers are busy, or the account is over a limit. Retry-After has the seconds to wait.",
    "500": "An internal error.",
    "503": "No worker is available, or the gateway stops. Retry-After has the seconds to wait.",
    "504": "The request took longer than its deadline. x-should-retry is false.",
}
_GENERATION_ERRORS: Mapping[ErrorFormat, tuple[str, ...]] = {
    "openai": ("400", "401", "403", "404", "408", "413", "429", "500", "503", "504"),
    "cloudflare": ("400", "401", "403", "404", "408", "413", "429", "500", "503"),
    "binding": ("400", "401", "403", "404", "408", "413", "429", "500", "503"),
}
_HEAD_ERRORS = ("414", "431")
"""Of every endpoint: what the HTTP server refuses before it looks at the endpoint."""
_READ_ERRORS = ("400", "401", "403", "404", "500", "503")
_REQUEST_ID = {
    "cf-ai-req-id": {"description": "The request's id, also in the logs.", "schema": {"type": "string"}},
    "x-request-id": {"description": "The same id.", "schema": {"type": "string"}},
    "server-timing": {"description": "Durations in milliseconds so far.", "schema": {"type": "string"}},
}


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
    """A parameter; `place` is "path", "query" or "header"."""

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
    """One method of one path. `answer` is the schema of an answer, `event` names the schema of a stream's events."""

    method: str
    path: str
    tag: str
    name: str
    summary: str
    error_format: ErrorFormat = "openai"
    body: Mapping[str, Any] | None = None
    answer: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    media_type: str = JSON
    event: str = ""
    parameters: Sequence[Parameter] = ()
    example: Mapping[str, Any] | None = None
    errors: Sequence[str] | None = None
    """Statuses; None for those of all endpoints of this kind."""
    error: Mapping[str, Any] | None = None
    """The schema of errors; None for the schema of `error_format`."""

    def as_json(self) -> dict[str, Any]:
        described: dict[str, Any] = {"operationId": self.name, "tags": [self.tag], "summary": self.summary}
        if self.parameters:
            described["parameters"] = [parameter.as_json() for parameter in self.parameters]
        if self.body is not None:
            content = {"schema": dict(self.body), **({"example": dict(self.example)} if self.example else {})}
            described["requestBody"] = {"required": True, "content": {JSON: content}}
        described["responses"] = self._responses()
        return described

    def _responses(self) -> dict[str, Any]:
        content: dict[str, Any] = {self.media_type: {"schema": dict(self.answer)}}
        if self.event:
            content[EVENTS] = {"schema": event_stream(self.event)}
        responses = {"200": {"description": "The answer.", "headers": _REQUEST_ID, "content": content}}
        return responses | {status: self._error(status) for status in self._statuses()}

    def _statuses(self) -> Sequence[str]:
        usual = _GENERATION_ERRORS[self.error_format] if self.body is not None else _READ_ERRORS
        return sorted({*(usual if self.errors is None else self.errors), *_HEAD_ERRORS})

    def _error(self, status: str) -> dict[str, Any]:
        error = {"schema": dict(self.error or reference(_ERROR_OF[self.error_format]))}
        return {"description": _REASONS[status], "headers": _REQUEST_ID, "content": {JSON: error}}


OPENAI = "OpenAI"
REST = "Workers AI, REST"
BINDING = "Workers AI, env.AI"
OPERATING = "Operating"
TAGS = {
    OPENAI: "For OpenAI's clients: under /v1 and, with Cloudflare's errors, under Cloudflare's URLs.",
    REST: "For Cloudflare's SDKs: each result and each error is in an envelope.",
    BINDING: "For `env.AI` in workerd: results without an envelope, and errors that become exceptions.",
    OPERATING: "For operators.",
}

_ACCOUNTS = "/client/v4/accounts/{account}/ai"
_ACCOUNT = Parameter(
    "account",
    "path",
    {"type": "string", "minLength": 1, "maxLength": MAX_ACCOUNT_CHARACTERS},
    "The account of the request.",
)
_MODEL = Parameter("model", "path", {"type": "string", "minLength": 1}, "The model's name or alias, with %2F or /.")
_READY_MODEL = Parameter("model", "query", {"type": "string", "minLength": 1}, "Ask for this model alone.")
_AFFINITY = Parameter(
    "x-session-affinity",
    "header",
    {"type": "string", "maxLength": MAX_SESSION_CHARACTERS},
    "Requests of an account for a model with the same value go to the same workers.",
)
_SERVICE_TIER = Parameter(
    SERVICE_TIER_HEADER,
    "header",
    {"enum": list(HEADER_TIERS)},
    "The class of the request, if the body has no `service_tier`. `batch` and `flex` are served while no other waits.",
)
_EXPLAIN = Parameter(
    EXPLAIN_HEADER, "header", {"enum": ["1"]}, "The answer has the explanation of the request in the field `tandem`."
)
_HEADER_MODEL = Parameter(MODEL_HEADER, "header", {"type": "string", "minLength": 1}, "The model's name.", True)
_PAGING = (
    Parameter(
        "page", "query", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 1}, "Page number, from 1."
    ),
    Parameter(
        "per_page",
        "query",
        {"type": "integer", "minimum": 1, "maximum": MAX_PER_PAGE, "default": 50},
        "Entries per page.",
    ),
)
_SEARCH = (
    Parameter("search", "query", {"type": "string"}, "Part of a name or of an alias."),
    Parameter("author", "query", {"type": "string"}, "`meta` of `@cf/meta/...`."),
    Parameter("task", "query", {"type": "string"}, "Name or id of a task, such as Text Embeddings."),
    Parameter("source", "query", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}, "The only source is 1."),
    Parameter("hide_experimental", "query", {"type": "boolean"}, "No effect."),
    Parameter("include_deprecated", "query", {"type": "boolean"}, "No effect."),
    *_PAGING,
)
_RUN_QUERY = (
    Parameter(
        "rejectIfBusy",
        "query",
        {"type": "boolean"},
        "Answer 429 at once, instead of waiting while every worker is busy.",
    ),
    Parameter("queueRequest", "query", {"type": "boolean", "enum": [False]}, "Asynchronous batches: not supported."),
)


def enveloped(result: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of Cloudflare's envelope around a result."""
    return {
        "type": "object",
        "required": ["result", "success", "errors", "messages"],
        "properties": {
            "result": result,
            "success": {"const": True},
            "errors": {"type": "array", "items": reference("Problem")},
            "messages": {"type": "array"},
        },
    }


def _closed(required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    rules = {"required": required.split(), "additionalProperties": False}
    return {"type": "object", "properties": properties, **rules}


_RUN_BODY = {"anyOf": [reference(name) for name in ("TextGenerationBody", "EncoderInputs")]}
_RUN_ANSWERS = {
    "anyOf": [
        *map(reference, ("NativeResult", "ChatCompletion", "Completion")),
        *map(reference, ("NativeEmbeddings", "NativeScores")),
        {"type": "array", "items": reference("NativeClass")},
    ]
}


def operations(model: str) -> Iterator[Operation]:
    """Yield every endpoint. Examples use `model`."""
    yield from _openai("/v1", "", model)
    yield from _tokens(model)
    yield from _encoders(model)
    yield from _rest(model)
    yield from _openai(f"{_ACCOUNTS}/v1", "OfAccount", model)
    yield from _binding(model)
    yield from _operating()


def _openai(prefix: str, suffix: str, model: str) -> Iterator[Operation]:
    error_format = "cloudflare" if "{account}" in prefix else "openai"
    account, at = ((_ACCOUNT,), ", at Cloudflare's URL") if "{account}" in prefix else ((), "")
    common: dict[str, Any] = {"tag": OPENAI, "error_format": error_format}
    hello = {"role": "user", "content": "What is a KV cache?"}
    yield Operation(
        "post", f"{prefix}/chat/completions", name=f"createChatCompletion{suffix}",
        summary=f"Answer a conversation{at}", body=reference("ChatBody"), answer=reference("ChatCompletion"),
        event="ChatChunk", parameters=(*account, _AFFINITY, _SERVICE_TIER, _EXPLAIN),
        example={"model": model, "messages": [hello], "max_tokens": 64}, **common,
    )  # fmt: skip
    yield Operation(
        "post", f"{prefix}/completions", name=f"createCompletion{suffix}", summary=f"Continue one or more prompts{at}",
        body=reference("CompletionBody"), answer=reference("Completion"), event="Completion",
        parameters=(*account, _AFFINITY, _SERVICE_TIER, _EXPLAIN),
        example={"model": model, "prompt": "Once upon", "max_tokens": 64}, **common,
    )  # fmt: skip
    yield Operation(
        "get", f"{prefix}/models", name=f"listModels{suffix}", summary=f"List the models{at}", parameters=account,
        answer=reference("ModelList"), **common,
    )  # fmt: skip
    yield Operation(
        "get", f"{prefix}/models/{{model}}", name=f"retrieveModel{suffix}", summary=f"Show one model{at}",
        parameters=(*account, _MODEL), answer=reference("ModelObject"), **common,
    )  # fmt: skip


def _tokens(model: str) -> Iterator[Operation]:
    yield Operation(
        "post", "/tokenize", OPENAI, "tokenize", "Return a prompt or a chat as token ids; vLLM's form",
        body=reference("TokenizeBody"), answer=reference("Tokenized"), example={"model": model, "prompt": "Once upon"},
    )  # fmt: skip
    yield Operation(
        "post", "/detokenize", OPENAI, "detokenize", "Return token ids as a text; vLLM's form",
        body=reference("DetokenizeBody"), answer=reference("Detokenized"), example={"model": model, "tokens": [1, 2]},
    )  # fmt: skip


def _encoders(model: str) -> Iterator[Operation]:
    here: dict[str, Any] = {"parameters": (_SERVICE_TIER, _EXPLAIN)}
    at_cloudflare: dict[str, Any] = {"parameters": (_ACCOUNT, _SERVICE_TIER, _EXPLAIN), "error_format": "cloudflare"}
    for prefix, name, common in (("/v1", "", here), (f"{_ACCOUNTS}/v1", "OfAccount", at_cloudflare)):
        yield Operation(
            "post", f"{prefix}/embeddings", OPENAI, f"createEmbeddings{name}", "Embed texts",
            body=reference("EmbeddingsBody"), answer=reference("EmbeddingList"),
            example={"model": model, "input": ["A text", "Another one"]}, **common,
        )  # fmt: skip
        yield Operation(
            "post", f"{prefix}/rerank", OPENAI, f"rerank{name}", "Rank documents by a query; Cohere's and Jina's form",
            body=reference("RerankBody"), answer=reference("Ranking"),
            example={"model": model, "query": "What is a KV cache?", "documents": ["A cache.", "A bird."]}, **common,
        )  # fmt: skip
    yield Operation(
        "post", "/v2/rerank", OPENAI, "rerankV2", "The same as /v1/rerank, where Cohere's clients look",
        parameters=(_SERVICE_TIER, _EXPLAIN),
        body=reference("RerankBody"), answer=reference("Ranking"),
        example={"model": model, "query": "What is a KV cache?", "documents": ["A cache.", "A bird."]},
    )  # fmt: skip


def _rest(model: str) -> Iterator[Operation]:
    common: dict[str, Any] = {"tag": REST, "error_format": "cloudflare"}
    inputs = {"prompt": "What is a KV cache?", "max_tokens": 64}
    run: dict[str, Any] = {"answer": enveloped(_RUN_ANSWERS), "event": "StreamEvent", **common}
    yield Operation(
        "post", f"{_ACCOUNTS}/run/{{model}}", name="run", summary="Run a model", body=_RUN_BODY,
        parameters=(_ACCOUNT, _MODEL, *_RUN_QUERY, _AFFINITY, _SERVICE_TIER, _EXPLAIN), example=inputs, **run,
    )  # fmt: skip
    yield Operation(
        "post", f"{_ACCOUNTS}/run", name="runNamed", summary="Run the model that the body names",
        body=_closed("model input", model={"type": "string"}, input=_RUN_BODY),
        parameters=(_ACCOUNT, *_RUN_QUERY, _AFFINITY, _SERVICE_TIER, _EXPLAIN),
        example={"model": model, "input": inputs}, **run,
    )  # fmt: skip
    yield Operation(
        "get", f"{_ACCOUNTS}/models/search", name="searchModels", summary="Find models",
        parameters=(_ACCOUNT, *_SEARCH), answer=reference("FoundModels"), **common,
    )  # fmt: skip
    yield Operation(
        "get", f"{_ACCOUNTS}/models/schema", name="modelSchema", summary="Show the schemas of a model",
        parameters=(_ACCOUNT, Parameter("model", "query", {"type": "string", "minLength": 1}, "The name.", True)),
        answer=reference("FoundSchemas"), **common,
    )  # fmt: skip
    yield Operation(
        "get", f"{_ACCOUNTS}/tasks/search", name="searchTasks", summary="List the models' tasks",
        parameters=(_ACCOUNT, *_PAGING), answer=reference("FoundTasks"), **common,
    )  # fmt: skip
    yield Operation(
        "get", f"{_ACCOUNTS}/authors/search", name="searchAuthors", summary="List the models' authors",
        parameters=(_ACCOUNT, *_PAGING), answer=reference("FoundAuthors"), **common,
    )  # fmt: skip


def _binding(model: str) -> Iterator[Operation]:
    common: dict[str, Any] = {"tag": BINDING, "error_format": "binding"}
    call: dict[str, Any] = {
        "body": _closed("inputs", inputs=_RUN_BODY, options=_or_null(reference("RunOptions"))),
        "answer": _RUN_ANSWERS,
        "event": "StreamEvent",
        "example": {"inputs": {"prompt": "What is a KV cache?", "max_tokens": 64}, "options": {}},
    }
    headers = (_HEADER_MODEL, _AFFINITY, _SERVICE_TIER, _EXPLAIN)
    yield Operation(
        "post", "/run", name="bindingRun", summary="`AI.run(model, inputs, options)`", parameters=headers, **call,
        **common,
    )  # fmt: skip
    yield Operation(
        "get", "/run", name="bindingWebSocket", summary="`AI.run` with `websocket`: refused by name",
        errors=("400", "405"), **common,
    )  # fmt: skip
    yield Operation(
        "post", "/ai-gateway/run", name="bindingGatewayRun", summary="`AI.run` with `gateway: {id}`",
        parameters=headers, **call, **common,
    )  # fmt: skip
    yield Operation(
        "get", "/ai-api/models/search", name="bindingModels", summary="`AI.models(params)`", tag=BINDING,
        error_format="cloudflare", parameters=_SEARCH, answer=reference("FoundModels"),
    )  # fmt: skip
    to = Parameter("X-Forwarded", "header", {"type": "string"}, "`https://workers-binding.ai/run?version=3`.", True)
    yield Operation(
        "post", PROXY_PATH, name="bindingProxy", summary="The same calls, proxied by wrangler or miniflare",
        parameters=(_ACCOUNT, to, *headers), **(call | {"answer": {}}), **common,
        error={"anyOf": [reference("BindingError"), reference("ErrorEnvelope")]},
    )  # fmt: skip


_REQUEST_FILTERS = (
    Parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": 50}, "Rows."),
    Parameter("model", "query", {"type": "string"}, "Requests that this model answers."),
    Parameter("account", "query", {"type": "string"}, "Requests of this account."),
    Parameter("state", "query", {"enum": list(STATES)}, "Requests in this state."),
)
_EVENT_FILTERS = (
    Parameter("after", "query", {"type": "integer", "minimum": 0}, "Events with a greater id, the oldest first."),
    Parameter(
        "limit", "query", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_OF_EVENTS, "default": 100}, "Rows."
    ),
    Parameter("kind", "query", {"enum": list(KINDS)}, "Events of this kind."),
    Parameter("severity", "query", {"enum": list(SEVERITIES)}, "Events of this severity."),
    Parameter("worker", "query", {"type": "string"}, "Events of this worker, by its id or name."),
)
_EVENT = _closed(
    "id time_ms kind severity gateway role worker host model request_id cause message fields",
    id={"type": "integer"}, time_ms={"type": "integer"}, kind={"enum": list(KINDS)},
    severity={"enum": list(SEVERITIES)}, fields={"type": "object"},
    **{name: {"type": "string"} for name in (
        "gateway", "role", "worker", "host", "model", "request_id", "cause", "message",
    )},
)  # fmt: skip
_EVENT_LIST = _closed("object data", object={"const": "list"}, data={"type": "array", "items": _EVENT})
_DRAINED = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "name": {"type": "string", "description": "Its `--worker-id`."},
        "state": {"enum": ["draining", "ready"]},
        "num_running": {"type": "integer", "description": "Requests there, by its last heartbeat."},
        "warning": {
            "type": "string",
            "description": "What clients notice: no other worker of its role takes requests for the model.",
        },
    },
    "required": ["id", "name", "state", "num_running"],
}
_PROBED = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "name": {"type": "string", "description": "Its `--worker-id`."},
        "proven": {"type": "boolean", "description": "A request went the whole way through this worker."},
        "seconds": {"type": "number"},
        "reason": {"type": "string", "description": "Why it is not proven."},
        "partner": {"type": "string", "description": "The worker of the other half."},
    },
    "required": ["id", "name", "proven", "seconds"],
}
_ROLL_NAME = {"type": "string", "maxLength": MAX_ROLL_NAME_CHARACTERS}
_ROLL = {
    "type": "object",
    "properties": {
        "state": {"enum": ["started", "step", "finished", "rolled_back"]},
        "num_workers": {"type": "integer", "minimum": 0, "maximum": MAX_ROLL_WORKERS},
        "worker": {
            "type": "string",
            "maxLength": MAX_ROLL_NAME_CHARACTERS,
            "description": "That was replaced, by its name.",
        },
        "to": {"type": "string", "maxLength": MAX_ROLL_NAME_CHARACTERS, "description": "That is in its place."},
        "reason": {
            "type": "string",
            "maxLength": MAX_ROLL_REASON_CHARACTERS,
            "description": "Why the roll was taken back.",
        },
    },
    "required": ["state"],
}
_LIVE_EVENTS = {
    "type": "object",
    "description": "Server-sent events until the gateway drains, for 15 minutes at most.",
    "properties": {
        "event": {"enum": ["hello", "fleet", "requests", "cache", "event"]},
        "data": {"anyOf": [{"type": "string", "contentMediaType": JSON, "contentSchema": {"type": "object"}}]},
    },
    "required": ["event", "data"],
}


def _operating() -> Iterator[Operation]:
    yield Operation(
        "get", "/v1/workers", OPERATING, "listWorkers", "The fleet: state, load and memory of every worker",
        answer=reference("WorkerList"),
    )  # fmt: skip
    yield Operation(
        "get", "/v1/requests", OPERATING, "listRequests",
        "Requests: those that run, then the newest; a token sees its account's, an operator's all",
        parameters=_REQUEST_FILTERS, answer=reference("RequestList"), errors=_READ_ERRORS,
    )  # fmt: skip
    yield Operation(
        "get", "/v1/requests/{request_id}/explain", OPERATING, "explainRequest",
        "One request explained: where its time went, its route, moves and cost",
        parameters=(Parameter("request_id", "path", {"type": "string", "minLength": 1}, "Of `x-request-id`."),),
        answer=reference("ExplanationObject"), errors=_READ_ERRORS,
    )  # fmt: skip
    yield Operation(
        "get", "/v1/events", OPERATING, "listEvents",
        "What the fleet decided and why: the newest, or the first ones after an id; the newest is the last",
        parameters=_EVENT_FILTERS, answer=_EVENT_LIST, errors=_READ_ERRORS,
    )  # fmt: skip
    for action, summary in (
        ("drain", "Let a worker finish what runs and take nothing new"),
        ("resume", "Let a worker that was drained take requests again"),
    ):
        yield Operation(
            "post", f"/v1/workers/{{worker}}/{action}", OPERATING, f"{action}Worker", summary,
            parameters=(Parameter("worker", "path", {"type": "string", "minLength": 1}, "Its id or its name."),),
            answer=_DRAINED, errors=(*_READ_ERRORS, "503"),
        )  # fmt: skip
    yield Operation(
        "post", "/v1/workers/{worker}/probe", OPERATING, "probeWorker",
        "Send a small request through this worker, and say whether it came back whole",
        parameters=(Parameter("worker", "path", {"type": "string", "minLength": 1}, "Its id or its name."),),
        answer=_PROBED, errors=_READ_ERRORS,
    )  # fmt: skip
    yield Operation(
        "post", "/v1/rolls", OPERATING, "reportRoll",
        "Tell the fleet's events what a supervisor does that replaces workers",
        body=_ROLL, answer=_closed("object state", object={"const": "roll"}, state={"type": "string"}),
        errors=(*_READ_ERRORS, "413"),
    )  # fmt: skip
    yield Operation(
        "get", "/v1/live", OPERATING, "live",
        "What the live page shows, as it changes: events `hello`, `fleet`, `requests`, `cache` and `event`",
        answer=_LIVE_EVENTS, media_type=EVENTS, errors=(*_READ_ERRORS, "429"),
    )  # fmt: skip
    yield Operation(
        "get", "/metrics", OPERATING, "metrics", "This gateway's metrics, for Prometheus",
        answer={"type": "string"}, media_type="text/plain",
    )  # fmt: skip
    yield Operation(
        "get", "/v1/metrics/targets", OPERATING, "metricsTargets",
        "Where Prometheus finds the metrics of each worker and KV service (HTTP service discovery)",
        answer={"type": "array", "items": {"type": "object"}},
    )  # fmt: skip
    yield Operation("get", "/healthz", OPERATING, "health", "The process is alive")
    yield Operation(
        "get", "/readyz", OPERATING, "readiness",
        "200 once the gateway has seen its fleet and while any worker answers; of one model: while it is answered",
        parameters=(_READY_MODEL,), errors=("500",),
    )  # fmt: skip
    yield Operation(
        "get", "/health", OPERATING, "healthAsElsewhere", "As `/readyz`: where vLLM answers",
        parameters=(_READY_MODEL,), errors=("500",),
    )  # fmt: skip
    yield Operation(
        "get", "/ping", OPERATING, "ping", "As `/readyz`: where SageMaker asks",
        parameters=(_READY_MODEL,), errors=("500",),
    )  # fmt: skip
    yield Operation("get", "/version", OPERATING, "version", "The version of the gateway's package")


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}
