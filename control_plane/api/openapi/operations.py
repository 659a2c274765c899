"""Which endpoints are there, and what do they take and answer?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from control_plane.api.openapi.operation import Operation, Parameter, reference
from control_plane.api.workers_ai.binding import MODEL_HEADER
from control_plane.api.workers_ai.remote_proxy import PATH as PROXY_PATH
from control_plane.api.workers_ai.search import MAX_PAGE, MAX_PER_PAGE

OPENAI = "OpenAI"
REST = "Workers AI, REST"
BINDING = "Workers AI, env.AI"
OPERATING = "Operating"
TAGS = {
    OPENAI: "What OpenAI's clients call, under /v1 and, with Cloudflare's errors, under Cloudflare's own address.",
    REST: "What Cloudflare's SDKs call: an envelope around every result and every error.",
    BINDING: "What workerd's `env.AI` calls inside a Worker: bare results, and errors that become exceptions.",
    OPERATING: "For those who run it.",
}

_ACCOUNTS = "/client/v4/accounts/{account}/ai"
_ACCOUNT = Parameter("account", "path", {"type": "string", "minLength": 1}, "Whose request it is.")
_MODEL = Parameter("model", "path", {"type": "string", "minLength": 1}, "The model's name or alias; %2F and / both do.")
_AFFINITY = Parameter(
    "x-session-affinity", "header", {"type": "string"}, "Requests with the same value go to the same workers."
)
_HEADER_MODEL = Parameter(MODEL_HEADER, "header", {"type": "string", "minLength": 1}, "The model's name.", True)
_PAGING = (
    Parameter("page", "query", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 1}, "From 1."),
    Parameter(
        "per_page", "query", {"type": "integer", "minimum": 1, "maximum": MAX_PER_PAGE, "default": 50}, "Page's length."
    ),
)
_SEARCH = (
    Parameter("search", "query", {"type": "string"}, "A part of the name or of an alias."),
    Parameter("author", "query", {"type": "string"}, "`meta` of `@cf/meta/...`."),
    Parameter("task", "query", {"type": "string"}, "Name or id of a task; Text Generation is the only one."),
    Parameter("source", "query", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}, "1 is the only one."),
    Parameter("hide_experimental", "query", {"type": "boolean"}, "No model is."),
    Parameter("include_deprecated", "query", {"type": "boolean"}, "No model is."),
    *_PAGING,
)
_RUN_QUERY = (
    Parameter("rejectIfBusy", "query", {"type": "boolean"}, "429 at once instead of waiting while all are busy."),
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


def _generated() -> dict[str, Any]:
    """Return what running a model gives, by its wire format."""
    return {"anyOf": [reference(name) for name in ("NativeResult", "ChatCompletion", "Completion")]}


def operations(model: str) -> Iterator[Operation]:
    """Yield every endpoint; `model` is the one that examples ask."""
    yield from _openai("/v1", "", model)
    yield from _rest(model)
    yield from _openai(f"{_ACCOUNTS}/v1", "OfAccount", model)
    yield from _binding(model)
    yield from _operating()


def _openai(prefix: str, suffix: str, model: str) -> Iterator[Operation]:
    face = "cloudflare" if "{account}" in prefix else "openai"
    account, at = ((_ACCOUNT,), ", at Cloudflare's address") if "{account}" in prefix else ((), "")
    common: dict[str, Any] = {"tag": OPENAI, "face": face}
    hello = {"role": "user", "content": "What is a KV cache?"}
    yield Operation(
        "post", f"{prefix}/chat/completions", name=f"createChatCompletion{suffix}",
        summary=f"Answer a conversation{at}", body=reference("ChatBody"), answer=reference("ChatCompletion"),
        event="ChatChunk", parameters=(*account, _AFFINITY),
        example={"model": model, "messages": [hello], "max_tokens": 64}, **common,
    )  # fmt: skip
    yield Operation(
        "post", f"{prefix}/completions", name=f"createCompletion{suffix}", summary=f"Continue one or more prompts{at}",
        body=reference("CompletionBody"), answer=reference("Completion"), event="Completion",
        parameters=(*account, _AFFINITY), example={"model": model, "prompt": "Once upon", "max_tokens": 64}, **common,
    )  # fmt: skip
    yield Operation(
        "get", f"{prefix}/models", name=f"listModels{suffix}", summary=f"List the models{at}", parameters=account,
        answer=reference("ModelList"), **common,
    )  # fmt: skip
    yield Operation(
        "get", f"{prefix}/models/{{model}}", name=f"retrieveModel{suffix}", summary=f"Show one model{at}",
        parameters=(*account, _MODEL), answer=reference("ModelObject"), **common,
    )  # fmt: skip


def _rest(model: str) -> Iterator[Operation]:
    common: dict[str, Any] = {"tag": REST, "face": "cloudflare"}
    inputs = {"prompt": "What is a KV cache?", "max_tokens": 64}
    run: dict[str, Any] = {"answer": enveloped(_generated()), "event": "StreamEvent", **common}
    yield Operation(
        "post", f"{_ACCOUNTS}/run/{{model}}", name="run", summary="Run a model", body=reference("TextGenerationBody"),
        parameters=(_ACCOUNT, _MODEL, *_RUN_QUERY, _AFFINITY), example=inputs, **run,
    )  # fmt: skip
    yield Operation(
        "post", f"{_ACCOUNTS}/run", name="runNamed", summary="Run the model that the body names",
        body=_closed("model input", model={"type": "string"}, input=reference("TextGenerationBody")),
        parameters=(_ACCOUNT, *_RUN_QUERY, _AFFINITY), example={"model": model, "input": inputs}, **run,
    )  # fmt: skip
    yield Operation(
        "get", f"{_ACCOUNTS}/models/search", name="searchModels", summary="Find models",
        parameters=(_ACCOUNT, *_SEARCH), answer=reference("FoundModels"), **common,
    )  # fmt: skip
    yield Operation(
        "get", f"{_ACCOUNTS}/models/schema", name="modelSchema", summary="Show a model's inputs and outputs",
        parameters=(_ACCOUNT, Parameter("model", "query", {"type": "string", "minLength": 1}, "The name.", True)),
        answer=reference("FoundSchemas"), **common,
    )  # fmt: skip
    yield Operation(
        "get", f"{_ACCOUNTS}/tasks/search", name="searchTasks", summary="List what models can do",
        parameters=(_ACCOUNT, *_PAGING), answer=reference("FoundTasks"), **common,
    )  # fmt: skip
    yield Operation(
        "get", f"{_ACCOUNTS}/authors/search", name="searchAuthors", summary="List who made the models",
        parameters=(_ACCOUNT, *_PAGING), answer=reference("FoundAuthors"), **common,
    )  # fmt: skip


def _binding(model: str) -> Iterator[Operation]:
    common: dict[str, Any] = {"tag": BINDING, "face": "binding"}
    call: dict[str, Any] = {
        "body": _closed("inputs", inputs=reference("TextGenerationBody"), options=_or_null(reference("RunOptions"))),
        "answer": _generated(),
        "event": "StreamEvent",
        "example": {"inputs": {"prompt": "What is a KV cache?", "max_tokens": 64}, "options": {}},
    }
    headers = (_HEADER_MODEL, _AFFINITY)
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
        face="cloudflare", parameters=_SEARCH, answer=reference("FoundModels"),
    )  # fmt: skip
    to = Parameter("X-Forwarded", "header", {"type": "string"}, "`https://workers-binding.ai/run?version=3`.", True)
    yield Operation(
        "post", PROXY_PATH, name="bindingProxy", summary="The same calls by way of wrangler or miniflare",
        parameters=(_ACCOUNT, to, *headers), **(call | {"answer": {}}), **common,
        error={"anyOf": [reference("BindingError"), reference("ErrorEnvelope")]},
    )  # fmt: skip


def _operating() -> Iterator[Operation]:
    yield Operation(
        "get", "/v1/workers", OPERATING, "listWorkers", "The fleet: state, load and memory of every worker",
        answer=reference("WorkerList"),
    )  # fmt: skip
    yield Operation("get", "/healthz", OPERATING, "health", "The process lives")
    yield Operation(
        "get", "/readyz", OPERATING, "readiness", "200 after a request has really gone the whole way lately, else 503",
        errors=("500",),
    )  # fmt: skip


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}
