"""Turns raw bodies of OpenAI's endpoints into checked requests. Plain code: it runs in text processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.api.chat_fields import messages_for_template
from control_plane.api.generation_fields import strictest
from control_plane.api.http.body import check, parse_object
from control_plane.api.openai.schema import ChatBody, CompletionBody, OpenAIBody
from control_plane.generation import ModelFacts
from control_plane.text.prepared import NOBODY, AnswerForm, Asked, ParsedBody, TextJob
from control_plane.text.request import ChatRequest, CompletionRequest
from tandem_runtime.errors import InvalidRequest

_MAX_CHOICES_PER_REQUEST = 256


def parse(job: TextJob, raw: bytes) -> ParsedBody:
    """Check a body as far as that is possible without its model. Raise InvalidRequest."""
    body = parse_object(raw)
    strict = job.strict_fields
    return _parse_chat(body, strict=strict) if job.endpoint == "chat" else _parse_completions(body, strict=strict)


@dataclass(frozen=True)
class _OpenAI:
    """A body of OpenAI's endpoints; its model changes nothing."""

    asked: Asked
    answer_form: AnswerForm
    of_body: Sequence[CompletionRequest | ChatRequest]

    def form(self, model: ModelFacts) -> AnswerForm:
        return self.answer_form

    def requests(self, model: ModelFacts) -> Sequence[CompletionRequest | ChatRequest]:
        return self.of_body


def _parse_chat(value: dict[str, Any], *, strict: bool) -> _OpenAI:
    body = check(ChatBody, value)
    body.check_extras(strict=strict)
    messages = messages_for_template(body.messages)
    request = ChatRequest(
        body.model,
        messages,
        NOBODY,
        body.generation_options(),
        body.tool_use(),
        template_variables=body.template_variables,
    )
    return _OpenAI(_asked(body, request), _form(body), [request])


def _parse_completions(value: dict[str, Any], *, strict: bool) -> _OpenAI:
    body = check(CompletionBody, value)
    body.check_extras(strict=strict)
    if len(body.prompt) * (body.n or 1) > _MAX_CHOICES_PER_REQUEST:
        raise InvalidRequest(
            f"{len(body.prompt)} prompts with n = {body.n or 1} are more than {_MAX_CHOICES_PER_REQUEST} answers; "
            "send several requests",
            field="prompt",
        )
    options = body.generation_options()
    requests = [
        CompletionRequest(body.model, prompt, NOBODY, options, control_tokens=body.raw or False)
        for prompt in body.prompt
    ]
    form = AnswerForm(
        body.model,
        stream=bool(body.stream),
        with_usage_chunk=body.wants_usage_chunk,
        with_continuous_usage=body.wants_continuous_usage,
        is_chat=False,
        echo=bool(body.echo),
        num_logprobs=body.logprobs,
    )
    return _OpenAI(_asked(body, requests[0], len(requests)), form, requests)


def _asked(body: OpenAIBody, request: CompletionRequest | ChatRequest, num_prompts: int = 1) -> Asked:
    reject_if_busy, timeout_seconds = strictest(body.options)
    asked = Asked.of(request)
    session = body.prompt_cache_key or ""
    tier = body.service_tier or ""
    return Asked(
        asked.model, asked.operation, asked.options, num_prompts, reject_if_busy, timeout_seconds, session, tier
    )


def _form(body: OpenAIBody) -> AnswerForm:
    return AnswerForm(
        body.model,
        stream=bool(body.stream),
        with_usage_chunk=body.wants_usage_chunk,
        with_continuous_usage=body.wants_continuous_usage,
        with_thinking=not (isinstance(body, ChatBody) and body.include_reasoning is False),
    )
