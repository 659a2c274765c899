"""OpenAI's endpoints: chat completions, completions and models.

They are under /v1 and, with Cloudflare's URLs, under /client/v4/accounts/{account}/ai/v1.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from control_plane.api.chat_fields import messages_for_template
from control_plane.api.collected_choice import Answer, collect
from control_plane.api.generation_fields import caller_with
from control_plane.api.http.body import check, read_json_object
from control_plane.api.http.request_context import caller_of, request_id_of, services_of
from control_plane.api.http.sse import DONE, EventStream, frame, while_connected
from control_plane.api.multi_prompt_stream import MultiPromptStream, start_all
from control_plane.api.openai.responses import (
    ChatSerializer,
    CompletionSerializer,
    ModelObject,
    PromptEcho,
    ResponseSerializer,
)
from control_plane.api.openai.schema import ChatBody, CompletionBody, OpenAIBody
from control_plane.generation import ModelDescription, Usage
from control_plane.text.prompt_logprobs import check_scored
from control_plane.text.request import ChatRequest, CompletionRequest
from control_plane.text.text_service import Prompt, TextStream
from tandem_runtime.errors import InvalidRequest

_MAX_CHOICES_PER_REQUEST = 256


def routes(prefix: str) -> list[Route]:
    """Return the endpoints under `prefix`, such as "/v1"."""
    return [
        Route(f"{prefix}/chat/completions", chat_completions, methods=["POST"]),
        Route(f"{prefix}/completions", completions, methods=["POST"]),
        Route(f"{prefix}/models", list_models, methods=["GET"]),
        Route(f"{prefix}/models/{{model:path}}", get_model, methods=["GET"]),
    ]


async def chat_completions(request: Request) -> Response:
    body = check(ChatBody, await read_json_object(request))
    body.check_extras()
    messages, caller = messages_for_template(body.messages), caller_with(request, body.options)
    chat = ChatRequest(body.model, messages, caller, body.generation_options(), body.tool_use())
    stream = await while_connected(request, services_of(request).text.start(chat), discard=TextStream.aclose)
    serializer = ChatSerializer(
        request_id_of(request), _named(body, stream.model), stream.model, with_usage_chunk=body.wants_usage_chunk
    )
    return await _respond(request, body, stream, serializer)


async def completions(request: Request) -> Response:
    body = check(CompletionBody, await read_json_object(request))
    body.check_extras()
    text = services_of(request).text
    prompts = await while_connected(request, _prepared(request, body))
    echoes, used = await while_connected(request, _echoes(request, body, prompts))
    starting = start_all([text.start_prepared(prompt) for prompt in prompts], used)
    answer = await while_connected(request, starting, discard=MultiPromptStream.aclose)
    usage = body.wants_usage_chunk
    name = _named(body, answer.model)
    serializer = CompletionSerializer(request_id_of(request), name, answer.model, with_usage_chunk=usage, echoes=echoes)
    return await _respond(request, body, answer, serializer)


async def list_models(request: Request) -> Response:
    models = [_model_json(model) for model in services_of(request).catalog.list()]
    return JSONResponse({"object": "list", "data": models})


async def get_model(request: Request) -> Response:
    return JSONResponse(_model_json(await services_of(request).catalog.get(request.path_params["model"])))


def _named(body: OpenAIBody, model: ModelDescription) -> str:
    """Return the model name of an answer: the caller's name for it, or the id of the fallback that answers."""
    return model.model_id if model.is_fallback else body.model


async def _prepared(request: Request, body: CompletionBody) -> list[Prompt]:
    """Tokenize every prompt of the body, so that no prompt starts if one of them is invalid."""
    if len(body.prompt) * (body.n or 1) > _MAX_CHOICES_PER_REQUEST:
        raise InvalidRequest(
            f"{len(body.prompt)} prompts with n = {body.n or 1} are more than {_MAX_CHOICES_PER_REQUEST} answers; "
            "send several requests",
            field="prompt",
        )
    caller, options = caller_with(request, body.options), body.generation_options()
    text = services_of(request).text
    callers = [caller, *(replace(caller, request_id=f"{caller.request_id}-{i}") for i in range(1, len(body.prompt)))]
    requests = [
        CompletionRequest(body.model, prompt, each, options, control_tokens=body.raw or False)
        for prompt, each in zip(body.prompt, callers, strict=True)
    ]
    return await asyncio.gather(*(text.prepare(each) for each in requests))


async def _respond(request: Request, body: OpenAIBody, answer: Answer, serializer: ResponseSerializer) -> Response:
    if not body.stream:
        async with aclosing(answer):
            choices = await while_connected(request, collect(answer))
        return Response(msgspec.json.encode(serializer.whole(choices, answer.usage)), media_type="application/json")
    # The header has the price of the prompts' scores only; the last chunk has the total.
    caller_of(request).answer_headers.pop("cf-ai-neurons", None)
    frames = _frames(answer, serializer, with_usage_chunk=body.wants_usage_chunk)
    ping_seconds = services_of(request).settings.ping_seconds
    return EventStream(request, frames, answer.aclose, ping_seconds=ping_seconds)


async def _frames(answer: Answer, serializer: ResponseSerializer, *, with_usage_chunk: bool) -> AsyncGenerator[bytes]:
    async for batch in answer.batches():
        yield b"".join([serializer.frames(delta) for delta in batch])
    if with_usage_chunk:
        yield frame(serializer.usage_chunk(answer.usage))
    yield DONE


async def _echoes(request: Request, body: CompletionBody, prompts: Sequence[Prompt]) -> tuple[list[PromptEcho], Usage]:
    """Return the echo of every choice, and a usage that has only the price of scoring the prompts.

    Prompts of token ids are decoded.
    """
    found: list[PromptEcho] = []
    used = Usage(0, 0, 0, 0)
    if not body.echo:
        return found, used
    if body.logprobs is not None:
        check_scored(sum(len(prompt.token_ids) for prompt in prompts))
    for prompt in prompts:
        echo = PromptEcho(prompt.text)
        if body.logprobs is not None:
            first = prompt.tokenizer.token_bytes(prompt.token_ids[0]).decode(errors="replace")
            scored, cost = await services_of(request).text.prompt_logprobs(prompt, body.logprobs)
            echo = replace(echo, first_token=first, logprobs=scored)
            used += Usage(
                0, 0, 0, 0, microneurons=cost.microneurons
            )  # the answer's own tokens are counted with the answer
        found += [echo] * prompt.request.options.num_choices
    return found, used


def _model_json(model: ModelDescription) -> ModelObject:
    return {
        "id": model.model_id,
        "object": "model",
        "created": model.created_unix_seconds,
        "owned_by": "tandem",
        "context_length": model.context_length,
        "aliases": list(model.aliases),
    }
