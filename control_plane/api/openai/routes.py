"""OpenAI's endpoints: chat completions, completions and models.

They are under /v1 and, with Cloudflare's URLs, under /client/v4/accounts/{account}/ai/v1.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from control_plane.api.answer_classes import AnswerClasses
from control_plane.api.collected_choice import Answer, collect
from control_plane.api.http.body_reading import body_is_prepared, read_text_body
from control_plane.api.http.explained import Explained
from control_plane.api.http.request_context import caller_of, request_id_of, services_of
from control_plane.api.http.sse import DONE, EventStream, frame, while_connected
from control_plane.api.multi_prompt_stream import MultiPromptStream, start_all
from control_plane.api.openai.bodies import parse
from control_plane.api.openai.responses import (
    ChatSerializer,
    CompletionSerializer,
    ModelObject,
    PromptEcho,
    ResponseSerializer,
    usage_json,
)
from control_plane.generation import ModelDescription, Usage
from control_plane.text.prepared import AnswerForm, TextJob
from control_plane.text.prompt_logprobs import check_scored
from control_plane.text.text_stream import Prompt, TextStream


def routes(prefix: str) -> list[Route]:
    """Return the endpoints under `prefix`, such as "/v1"."""
    return [
        Route(f"{prefix}/chat/completions", chat_completions, methods=["POST"]),
        Route(f"{prefix}/completions", completions, methods=["POST"]),
        Route(f"{prefix}/models", list_models, methods=["GET"]),
        Route(f"{prefix}/models/{{model:path}}", get_model, methods=["GET"]),
    ]


async def chat_completions(request: Request) -> Response:
    job = TextJob("chat")
    starting = _started_chat(request, job, await read_text_body(request, job))
    form, stream = await while_connected(request, starting, discard=_close)
    name, usage = _named(form, stream.model), form.with_usage_chunk
    serializer = ChatSerializer(request_id_of(request), name, stream.model, with_usage_chunk=usage)
    serializer.with_thinking = form.with_thinking
    return await _respond(request, form, stream, serializer)


async def completions(request: Request) -> Response:
    text = services_of(request).text
    job = TextJob("completions")
    preparing = text.prepare_body(job, await read_text_body(request, job), caller_of(request), parse)
    prepared = await while_connected(request, preparing)
    body_is_prepared(request)
    form, prompts = prepared.form, prepared.prompts
    echoes, used = await while_connected(request, _echoes(request, form, prompts))
    starting = start_all([text.start_prepared(prompt) for prompt in prompts], used)
    answer = await while_connected(request, starting, discard=MultiPromptStream.aclose)
    name, usage = _named(form, answer.model), form.with_usage_chunk
    serializer = CompletionSerializer(request_id_of(request), name, answer.model, with_usage_chunk=usage, echoes=echoes)
    return await _respond(request, form, answer, serializer)


async def _started_chat(request: Request, job: TextJob, raw: bytes) -> tuple[AnswerForm, TextStream]:
    text = services_of(request).text
    prepared = await text.prepare_body(job, raw, caller_of(request), parse)
    del raw  # the wait for a worker may be long
    body_is_prepared(request)
    (prompt,) = prepared.prompts
    return prepared.form, await text.start_prepared(prompt)


async def _close(started: tuple[AnswerForm, TextStream]) -> None:
    await started[1].aclose()


def _named(form: AnswerForm, model: ModelDescription) -> str:
    """Return the model name of an answer: the caller's name for it, or the id of the fallback that answers."""
    return model.model_id if model.is_fallback else form.model


async def list_models(request: Request) -> Response:
    services = services_of(request)
    return Response(services.served.listed(services.catalog, _list_json), media_type="application/json")


def _list_json(served: Sequence[ModelDescription]) -> bytes:
    models = [_model_json(each) for model in served for each in (model, *_with_adapters(model))]
    return msgspec.json.encode({"object": "list", "data": models})


async def get_model(request: Request) -> Response:
    return JSONResponse(_model_json(await services_of(request).catalog.get(request.path_params["model"])))


async def _respond(request: Request, form: AnswerForm, answer: Answer, serializer: ResponseSerializer) -> Response:
    classes = AnswerClasses(answer)
    if not form.stream:
        async with aclosing(answer):
            choices = await while_connected(request, collect(answer))
        if classes.is_mixed:
            serializer.in_class(classes.first)
        whole = msgspec.json.encode(serializer.whole(choices, answer.usage))
        body = Explained(request).whole(whole, classes.seams)
        return Response(body, media_type="application/json")
    # The header has the price of the prompts' scores only; the last chunk has the total.
    caller_of(request).answer_headers.pop("cf-ai-neurons", None)
    frames = _frames(answer, serializer, form, Explained(request), classes)
    ping_seconds = services_of(request).settings.ping_seconds
    return EventStream(request, frames, answer.aclose, ping_seconds=ping_seconds)


async def _frames(
    answer: Answer, serializer: ResponseSerializer, form: AnswerForm, explained: Explained, classes: AnswerClasses
) -> AsyncGenerator[bytes]:
    last, num_choices = b"", answer.num_choices
    async for batch in answer.batches():
        if classes.is_mixed:
            batch = classes.marked(batch, serializer.in_class)
        if form.with_continuous_usage:
            usage = usage_json(answer.usage)
            chunks = [{**chunk, "usage": usage} for delta in batch for chunk in serializer.counted_chunks(delta)]
            piece = b"".join(map(frame, chunks))
        else:
            piece = b"".join([serializer.frames(delta) for delta in batch])
        if serializer.num_finished < num_choices:
            yield piece
        else:  # it waits for the request's durations, which are complete when the loop ends
            last += piece
    if form.with_usage_chunk:
        yield last
        last = frame(serializer.usage_chunk(answer.usage))
    yield explained.in_last(last, classes.seams)
    yield explained.event(serializer.extra_chunk())
    yield DONE


async def _echoes(request: Request, form: AnswerForm, prompts: Sequence[Prompt]) -> tuple[list[PromptEcho], Usage]:
    """Return the echo of every choice, and a usage that has only the price of scoring the prompts."""
    found: list[PromptEcho] = []
    used = Usage(0, 0, 0, 0)
    if not form.echo:
        return found, used
    if form.num_logprobs is not None:
        check_scored(sum(len(prompt.token_ids) for prompt in prompts))
    for prompt in prompts:
        echo = PromptEcho(prompt.text)
        if form.num_logprobs is not None:
            first = prompt.vocabulary.token_bytes(prompt.token_ids[0]).decode(errors="replace")
            scored, cost = await services_of(request).text.prompt_logprobs(prompt, form.num_logprobs)
            echo = replace(echo, first_token=first, logprobs=scored)
            used += Usage(
                0, 0, 0, 0, microneurons=cost.microneurons
            )  # the answer's own tokens are counted with the answer
        found += [echo] * prompt.num_choices
    return found, used


def _model_json(model: ModelDescription) -> ModelObject:
    adapter = model.adapter
    described: ModelObject = {
        "id": model.model_id if adapter is None else f"{model.model_id}:{adapter.name}",
        "object": "model",
        "created": model.created_unix_seconds,
        "owned_by": "tandem",
        "context_length": model.context_length,
        "aliases": [f"{each}:{adapter.name}" if adapter else each for each in model.aliases],
    }
    if adapter is not None:
        described["parent"] = model.model_id
    return described


def _with_adapters(model: ModelDescription) -> list[ModelDescription]:
    return [replace(model, adapter=adapter) for adapter in model.adapters]
