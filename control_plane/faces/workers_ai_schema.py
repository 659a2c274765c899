"""Which bodies does Workers AI take for text generation?"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from control_plane.faces.body import check
from control_plane.faces.fields import Message, TextBody, messages_for_template
from control_plane.generation import ModelDescription
from control_plane.text.request import Caller, ChatRequest, CompletionRequest, GenerationOptions
from runtime.errors import InvalidRequest, Unsupported

_DEFAULT_MAX_TOKENS = 256
_DEFAULT_TEMPERATURE = 0.6


class TextGenerationBody(TextBody):
    """Exactly one of `prompt` and `messages`; limits are Cloudflare's."""

    prompt: str | None = None
    messages: list[Message] | None = None
    raw: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_p: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=1, le=50)] | None = None
    seed: Annotated[int, Field(ge=1, le=9_999_999_999)] | None = None

    def check_extras(self) -> None:
        super().check_extras()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is needed; send one of them", field="prompt")
        if self.n not in (None, 1):
            raise Unsupported("n above 1 is not supported here; use /v1/chat/completions", field="n")
        if self.raw and self.messages is not None:
            raise InvalidRequest("raw goes with prompt, not with messages; leave one of them out", field="raw")

    def generation_options(self) -> GenerationOptions:
        shared = self.shared_options()
        return replace(
            shared,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            default_max_tokens=_DEFAULT_MAX_TOKENS,
            temperature=self.temperature,
            default_temperature=_DEFAULT_TEMPERATURE,
            top_p=None if self.top_p is None else min(self.top_p, 1.0),  # above 1 it has no effect
            top_k=self.top_k,
            seed=self.seed,
        )

    def for_model(self, model: ModelDescription, caller: Caller) -> CompletionRequest | ChatRequest:
        """Return the request; a prompt is a user's message to a model with a chat template, unless it is `raw`."""
        options = self.generation_options()
        if self.messages is not None:
            return ChatRequest(model.model_id, messages_for_template(self.messages), caller, options)
        assert self.prompt is not None, "check_extras has seen to it"
        if self.prompt and model.chat_template and not self.raw:
            return ChatRequest(model.model_id, ({"role": "user", "content": self.prompt},), caller, options)
        return CompletionRequest(model.model_id, self.prompt, caller, options, control_tokens=self.raw or False)


def checked(inputs: Any) -> TextGenerationBody:
    """Check the inputs of a run; raises InvalidRequest."""
    if not isinstance(inputs, dict):
        raise InvalidRequest('inputs must be an object such as {"prompt": "..."}', field="inputs")
    body = check(TextGenerationBody, inputs)
    body.check_extras()
    return body
