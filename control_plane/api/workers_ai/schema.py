"""Bodies, run options and queries of Workers AI's text generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from control_plane.accounts.identity import Caller
from control_plane.api.chat_fields import (
    Choice,
    Messages,
    ThinkingFields,
    Tools,
    messages_for_template,
    tool_use,
)
from control_plane.api.generation_fields import UNSUPPORTED, RunOptions, TextBody
from control_plane.api.http.body import Body, check, refuse_extras
from control_plane.api.http.bounds import MAX_MODEL_CHARACTERS
from control_plane.generation import ModelFacts
from control_plane.text.request import ChatRequest, CompletionRequest, GenerationOptions
from tandem_engine.sampling_params import MAX_LOGPROBS
from tandem_runtime.errors import InvalidRequest, Unsupported

_IGNORED_IN_QUERY = frozenset({"version"})
"""`version` is the binding's protocol version."""

_FLAGS = {"true": True, "1": True, "false": False, "0": False, "": None, "undefined": None, "null": None}
"""Spellings of booleans in a query."""

_DEFAULT_MAX_TOKENS = 256
_DEFAULT_TEMPERATURE = 0.6


def _only(name: str, other: str) -> dict[str, Any]:
    """Return the rule that field `name` has a value and field `other` does not."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}, other: {"type": "null"}}}


class TextGenerationBody(TextBody, ThinkingFields):
    """Exactly one of `prompt` and `messages`. Limits are Cloudflare's."""

    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED | {"echo", "suffix", "best_of", "logit_bias"}
    json_schema_rules: ClassVar[dict[str, Any]] = {"oneOf": [_only("prompt", "messages"), _only("messages", "prompt")]}

    prompt: Annotated[str, Field(json_schema_extra={"minLength": 1})] | None = None
    """Becomes a user message if the model has a chat template."""
    messages: Messages | None = None
    raw: bool | None = None
    """Send the prompt to the model without the chat template."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum tokens of the answer; 256 if neither the request nor the model has a value."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens; takes precedence."""
    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    """0.6 if neither the request nor the model has a value; 0 always takes the likeliest token."""
    top_p: Annotated[float, Field(ge=0, le=2)] | None = None
    """Sample from the likeliest tokens that together have this probability; above 1 from all tokens."""
    top_k: Annotated[int, Field(ge=1, le=50)] | None = None
    """Sample from this many of the likeliest tokens."""
    seed: Annotated[int, Field(ge=1, le=9_999_999_999)] | None = None
    """The same request with the same seed gets the same answer."""
    logprobs: bool | None = None
    """Return the log probability of every token; only for models with OpenAI's wire format."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return also this many alternatives per token; needs logprobs."""
    lora: Annotated[str, Field(max_length=MAX_MODEL_CHARACTERS)] | None = None
    """The name of a LoRA adapter that the model's workers have loaded; the same as `model:adapter`."""
    tools: Tools = None
    """Tools that the answer may call."""
    tool_choice: Choice = None
    """auto: the model decides; none: the prompt omits the tools; required: the answer is calls; or one tool by name."""
    parallel_tool_calls: bool | None = None
    """false: at most one call."""

    def check_extras(self, *, strict: bool = False) -> None:
        super().check_extras(strict=strict)
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send exactly one of prompt and messages", field="prompt")
        if self.prompt == "":
            raise InvalidRequest("prompt is empty; send at least one character", field="prompt")
        if self.raw and self.messages is not None:
            raise InvalidRequest("raw can be used with prompt, not with messages; leave one of them out", field="raw")
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
            max_thinking_tokens=self.thinking_token_budget,
        )

    def for_model(self, model: ModelFacts, caller: Caller) -> CompletionRequest | ChatRequest:
        """Return the text request. For a model with a chat template, a prompt that is not `raw` becomes a user message.

        Raise Unsupported for options that the model's wire format cannot express.
        """
        if model.wire_format == "native":
            self._check_native_answers(model)
        options = self.generation_options()
        tools = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.messages is not None:
            messages = messages_for_template(self.messages)
            return ChatRequest(
                model.model_id, messages, caller, options, tools, template_variables=self.template_variables
            )
        assert self.prompt is not None, "check_extras requires prompt or messages"
        if model.chat_template and not self.raw:
            messages = ({"role": "user", "content": self.prompt},)
            return ChatRequest(
                model.model_id, messages, caller, options, tools, template_variables=self.template_variables
            )
        if tools is not None:
            why = "the prompt is raw" if self.raw else f"{model.model_id} has no chat template"
            raise InvalidRequest(f"tools need a chat, and {why}; leave one of them out", field="tools")
        return CompletionRequest(model.model_id, self.prompt, caller, options, control_tokens=self.raw or False)

    def _check_native_answers(self, model: ModelFacts) -> None:
        for name, is_requested in (("n above 1", self.n not in (None, 1)), ("logprobs", self.logprobs)):
            if is_requested:
                raise Unsupported(
                    f"{name} is not supported here: {model.model_id} has the native wire format, which has one text; "
                    "use /v1/chat/completions",
                    field=name.split(" ")[0],
                )


def checked(inputs: Any, *, strict: bool = False) -> TextGenerationBody:
    """Return the checked inputs of a run. Raise InvalidRequest."""
    if not isinstance(inputs, dict):
        raise InvalidRequest('inputs must be an object such as {"prompt": "..."}', field="inputs")
    body = check(TextGenerationBody, inputs)
    body.check_extras(strict=strict)
    return body


class RunQuery(Body):
    """The run options that a query can carry; all are booleans."""

    for_clients: ClassVar[frozenset[str]] = frozenset({"returnRawResponse", "tags", "gateway"})

    rejectIfBusy: bool | None = None
    queueRequest: bool | None = None
    websocket: bool | None = None


def options_of(value: Any) -> RunOptions:
    """Return the checked `options` of a call. Raise InvalidRequest naming the option."""
    if value is None:
        return RunOptions()
    if not isinstance(value, dict):
        raise InvalidRequest("options must be an object such as {}", field="options")
    options = check(RunOptions, value, at="options.")
    options.check()
    refuse_extras(options, at="options.")
    return options


def options_in_query(query: Mapping[str, str]) -> RunOptions:
    """Return the checked run options of a query. Raise InvalidRequest naming the wrong option."""
    values = {name: _FLAGS.get(text.lower(), text) for name, text in query.items() if name not in _IGNORED_IN_QUERY}
    values_checked = check(RunQuery, values, at="?")
    refuse_extras(values_checked, at="?")
    options = RunOptions(**values_checked.model_dump(include=set(RunQuery.model_fields)))
    options.check("?")
    return options
