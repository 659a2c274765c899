"""Which bodies does Workers AI take for text generation?"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from control_plane.api.chat_messages import Message, messages_for_template
from control_plane.api.generation_fields import UNSUPPORTED, TextBody
from control_plane.api.http.body import check
from control_plane.api.http.errors import NoLora
from control_plane.api.tools import Choice, Tools, tool_use
from control_plane.generation import ModelDescription
from control_plane.text.request import Caller, ChatRequest, CompletionRequest, GenerationOptions
from tandem_engine.scheduling.sampling_params import MAX_LOGPROBS
from tandem_runtime.errors import InvalidRequest, Unsupported

_DEFAULT_MAX_TOKENS = 256
_DEFAULT_TEMPERATURE = 0.6


def _only(name: str, other: str) -> dict[str, Any]:
    """Return the rule that one field says something and the other does not."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}, other: {"type": "null"}}}


class TextGenerationBody(TextBody):
    """Exactly one of `prompt` and `messages`; limits are Cloudflare's."""

    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED | {"echo", "suffix", "best_of", "logit_bias"}
    json_schema_rules: ClassVar[dict[str, Any]] = {"oneOf": [_only("prompt", "messages"), _only("messages", "prompt")]}

    prompt: Annotated[str, Field(json_schema_extra={"minLength": 1})] | None = None
    """Becomes a user's message if the model has a chat template."""
    messages: Annotated[list[Message], Field(json_schema_extra={"minItems": 1})] | None = None
    raw: bool | None = None
    """The prompt goes to the model as it stands, without the chat template."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Of the answer; 256 if neither the request nor the model says."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """max_tokens by its newer name; goes before it."""
    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    """0.6 if neither the request nor the model says; 0: always the likeliest token."""
    top_p: Annotated[float, Field(ge=0, le=2)] | None = None
    """Draw from the likeliest tokens that together have this probability; above 1: from all."""
    top_k: Annotated[int, Field(ge=1, le=50)] | None = None
    """Draw from so many of the likeliest tokens."""
    seed: Annotated[int, Field(ge=1, le=9_999_999_999)] | None = None
    """The same request with the same seed has the same answer."""
    logprobs: bool | None = None
    """The log probability of every token, of models whose wire format is OpenAI's."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """And of as many alternatives; needs logprobs."""
    lora: Annotated[str | None, Field(json_schema_extra={"enum": ["", None]})] = None
    """Adapters are not supported."""
    tools: Tools = None
    """What the answer may call."""
    tool_choice: Choice = None
    """auto: as the model likes; none: no calls, and nobody tells it of the tools; required: calls; or one by name."""
    parallel_tool_calls: bool | None = None
    """false: one call at the most."""

    def check_extras(self) -> None:
        super().check_extras()
        if self.lora:
            raise NoLora("lora (adapters) is not supported here; leave it out", field="lora")
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is needed; send one of them", field="prompt")
        if self.prompt == "":
            raise InvalidRequest("prompt is empty; send at least one character", field="prompt")
        if self.raw and self.messages is not None:
            raise InvalidRequest("raw goes with prompt, not with messages; leave one of them out", field="raw")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs; send logprobs: true with it", field="top_logprobs")

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
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def for_model(self, model: ModelDescription, caller: Caller) -> CompletionRequest | ChatRequest:
        """Return the request; a prompt is a user's message to a model with a chat template, unless it is `raw`.

        Raises Unsupported for what the model's answers have no place for.
        """
        if model.wire_format == "native":
            self._fits_native_answers(model)
        options = self.generation_options()
        tools = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.messages is not None:
            return ChatRequest(model.model_id, messages_for_template(self.messages), caller, options, tools)
        assert self.prompt is not None, "check_extras has seen to it"
        if model.chat_template and not self.raw:
            return ChatRequest(model.model_id, ({"role": "user", "content": self.prompt},), caller, options, tools)
        if tools is not None:
            why = "the prompt is raw" if self.raw else f"{model.model_id} has no chat template"
            raise InvalidRequest(f"tools go with a chat, and {why}; leave one of them out", field="tools")
        return CompletionRequest(model.model_id, self.prompt, caller, options, control_tokens=self.raw or False)

    def _fits_native_answers(self, model: ModelDescription) -> None:
        for name, is_asked in (("n above 1", self.n not in (None, 1)), ("logprobs", self.logprobs)):
            if is_asked:
                raise Unsupported(
                    f"{name} is not supported here: {model.model_id} answers natively, with one text; "
                    "use /v1/chat/completions",
                    field=name.split(" ")[0],
                )


def checked(inputs: Any) -> TextGenerationBody:
    """Check the inputs of a run; raises InvalidRequest."""
    if not isinstance(inputs, dict):
        raise InvalidRequest('inputs must be an object such as {"prompt": "..."}', field="inputs")
    body = check(TextGenerationBody, inputs)
    body.check_extras()
    return body
