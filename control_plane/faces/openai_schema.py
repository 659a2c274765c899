"""Which bodies do OpenAI's clients send?"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from control_plane.faces.fields import Message, TextBody, TokenId
from control_plane.text.request import GenerationOptions
from engine.scheduling.sampling_params import MAX_LOGPROBS
from runtime.errors import Unsupported

Prompt = str | tuple[int, ...]


def _logit_bias(value: Any) -> Any:
    """OpenAI's keys are token ids written as text."""
    if not isinstance(value, dict):
        return value
    if not all(isinstance(key, str) and key.isdecimal() for key in value):
        raise ValueError("must have token ids as keys")
    return {int(key): bias for key, bias in value.items()}


def _prompts(value: Any) -> list[Prompt]:
    """Accept text, token ids, or a list of either: OpenAI's four shapes."""
    prompts = value if isinstance(value, list) and not _is_token_ids(value) else [value]
    if not prompts or not all(isinstance(prompt, str) or _is_token_ids(prompt) for prompt in prompts):
        raise ValueError("must be a string, a list of token ids, or a non-empty list of strings or lists of token ids")
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class OpenAIBody(TextBody):
    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None, BeforeValidator(_logit_bias)
    ] = None
    top_k: Annotated[int, Field(ge=-1)] | None = None

    def generation_options(self) -> GenerationOptions:
        return replace(
            self.shared_options(),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            logit_bias=self.logit_bias or {},
            top_k=None if self.top_k is None else max(self.top_k, 0),
        )


class ChatBody(OpenAIBody):
    messages: list[Message]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _logprobs_are_asked_for(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs; send logprobs: true with it")
        return self

    def generation_options(self) -> GenerationOptions:
        return replace(
            super().generation_options(),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionBody(OpenAIBody):
    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    raw: bool | None = None
    """Ours: names of control tokens in the prompt are control tokens."""

    def check_extras(self) -> None:
        super().check_extras()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise Unsupported("best_of is only supported when it equals n; leave it out", field="best_of")
        if self.echo and self.logprobs is not None:
            raise Unsupported("echo with logprobs is not supported; leave one of them out", field="echo")

    def generation_options(self) -> GenerationOptions:
        return replace(super().generation_options(), num_logprobs=self.logprobs)
