"""Turns raw bodies of Workers AI's endpoints into checked requests. Plain code: it runs in text processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from control_plane.api.encoders.native import is_for_encoders, parse_run
from control_plane.api.generation_fields import RunOptions, strictest
from control_plane.api.http.body import parse_object
from control_plane.api.http.bounds import check_model_name
from control_plane.api.workers_ai.schema import TextGenerationBody, checked, options_in_query, options_of
from control_plane.generation import ModelFacts
from control_plane.text.prepared import (
    NOBODY,
    AnswerForm,
    Asked,
    AskedOptions,
    EncoderBody,
    Operation,
    ParsedBody,
    TextJob,
)
from control_plane.text.request import ChatRequest, CompletionRequest
from tandem_runtime.errors import InvalidRequest


def parse(job: TextJob, raw: bytes) -> ParsedBody | EncoderBody:
    """Check a body as far as that is possible without its model. Raise InvalidRequest."""
    body = parse_object(raw)
    if job.endpoint == "binding":
        return _parse_binding(job.model, body, strict=job.strict_fields)
    model, inputs = _named_in_body(body) if job.endpoint == "run_named_in_body" else (job.model, body)
    return _run(model, inputs, options_in_query(dict(job.query)), strict=job.strict_fields)


def _run(model: str, inputs: Any, options: RunOptions, *, strict: bool) -> ParsedBody | EncoderBody:
    if is_for_encoders(inputs):
        return parse_run(model, inputs, *strictest(options), strict=strict)
    body = checked(inputs, strict=strict)
    return _Run(model, body, *strictest(body.options, options))


def _named_in_body(body: dict[str, Any]) -> tuple[str, Any]:
    """Return model and input of `{"model": ..., "input": {...}}`."""
    model = body.get("model")
    if not isinstance(model, str):
        raise InvalidRequest("model is missing; send it in the body or in the path", field="model")
    check_model_name(model)
    unknown = sorted(set(body) - {"model", "input"})
    if unknown:
        raise InvalidRequest(
            f"{unknown[0]} is not a field of this request, which has model and input; move it into input",
            field=unknown[0],
        )
    return model, body.get("input")


def _parse_binding(model: str, call: dict[str, Any], *, strict: bool) -> ParsedBody | EncoderBody:
    unknown = sorted(set(call) - {"inputs", "options"})
    if unknown:
        raise InvalidRequest(
            f"{unknown[0]} is not a field of this request, which has inputs and options; move it into inputs",
            field=unknown[0],
        )
    return _run(model, call.get("inputs"), options_of(call.get("options")), strict=strict)


@dataclass(frozen=True)
class _Run:
    """The inputs of Workers AI's text generation. The model decides whether a prompt becomes a chat."""

    model: str
    body: TextGenerationBody
    reject_if_busy: bool
    timeout_seconds: float | None

    @property
    def asked(self) -> Asked:
        # Only the model decides whether a prompt becomes a chat; most models have a chat template.
        operation: Operation = "text_completion" if self.body.raw else "chat"
        options = AskedOptions.of(self.body.generation_options())
        session = self.body.prompt_cache_key or ""
        tier = self.body.service_tier or ""
        return Asked(self._asked_model, operation, options, 1, self.reject_if_busy, self.timeout_seconds, session, tier)

    @property
    def _asked_model(self) -> str:
        """The name in the catalogue; an adapter of the body takes the place after the model's name."""
        return f"{self.model}:{self.body.lora}" if self.body.lora else self.model

    def form(self, model: ModelFacts) -> AnswerForm:
        return AnswerForm(
            self.model,
            stream=bool(self.body.stream),
            is_json=self.body.wants_json,
            # Only chat messages have a field for tool calls.
            is_chat=self.body.messages is not None or bool(self.body.tools),
            with_thinking=self.body.include_reasoning is not False,
        )

    def requests(self, model: ModelFacts) -> Sequence[CompletionRequest | ChatRequest]:
        return [replace(self.body.for_model(model, NOBODY), model=self.model)]
