"""Bodies of OpenAI's chat completions and completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from control_plane.api.chat_fields import Choice, Messages, ThinkingFields, Tools, tool_use
from control_plane.api.generation_fields import HARMLESS, TextBody, TokenId
from control_plane.api.http.bounds import MAX_LOGIT_BIASES, MAX_MODEL_CHARACTERS, MAX_PROMPT_TOKENS, MAX_PROMPTS
from control_plane.text.request import GenerationOptions
from control_plane.text.tool import ToolUse
from tandem_engine.sampling_params import MAX_LOGPROBS
from tandem_runtime.errors import Unsupported

_MAX_DIGITS = 10
"""Of a token id; longer numbers are none."""

Prompt = str | tuple[int, ...]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _logit_bias(value: Any) -> Any:
    """Convert keys to token ids; OpenAI's clients write them as text."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"has {len(value):,} entries, the maximum is {MAX_LOGIT_BIASES:,}; send fewer")
    if not all(isinstance(key, str) and key.isdecimal() and len(key) <= _MAX_DIGITS for key in value):
        raise ValueError("must have token ids as keys")
    return {int(key): bias for key, bias in value.items()}


def _prompts(value: Any) -> list[Prompt]:
    """Accept text, token ids, or a list of either: OpenAI's four forms of a prompt."""
    prompts = value if isinstance(value, list) and not _is_token_ids(value) else [value]
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"has {len(prompts):,} prompts, the maximum is {MAX_PROMPTS}; send fewer")
    if not prompts or not all(isinstance(prompt, str) or _is_token_ids(prompt) for prompt in prompts):
        raise ValueError("must be a string, a list of token ids, or a non-empty list of strings or lists of token ids")
    longest = max((len(prompt) for prompt in prompts if isinstance(prompt, list)), default=0)
    if longest > MAX_PROMPT_TOKENS:
        raise ValueError(f"has {longest:,} token ids, the maximum is {MAX_PROMPT_TOKENS:,}; send fewer")
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]
Text = Annotated[str, Field(min_length=1)]
_Several = Field(min_length=1, max_length=MAX_PROMPTS)
Prompts = Text | TokenIds | Annotated[list[Text], _Several] | Annotated[list[TokenIds], _Several]


class OpenAIBody(TextBody):
    model: Annotated[str, Field(max_length=MAX_MODEL_CHARACTERS)]
    """The model's name or alias."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """1 if neither the request nor the model has a value; 0 always takes the likeliest token."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum tokens of the answer; without it, the rest of the context."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens; takes precedence."""
    seed: int | None = None
    """The same request with the same seed gets the same answer."""
    logit_bias: Annotated[
        dict[TokenId, Bias] | None,
        BeforeValidator(
            _logit_bias,
            json_schema_input_type=Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIASES)] | None,
        ),
    ] = None
    """Values added to the logits of these token ids."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Sample from this many of the likeliest tokens; 0 or -1 from all tokens."""

    def generation_options(self) -> GenerationOptions:
        return replace(
            self.shared_options(),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            logit_bias=self.logit_bias or {},
            top_k=None if self.top_k is None else max(self.top_k, 0),
        )


class ChatBody(OpenAIBody, ThinkingFields):
    messages: Messages
    logprobs: bool | None = None
    """Return the log probability of every token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return also this many alternatives per token; needs logprobs."""
    tools: Tools = None
    """Tools that the answer may call."""
    tool_choice: Choice = None
    """auto: the model decides; none: the prompt omits the tools; required: the answer is calls; or one tool by name."""
    parallel_tool_calls: bool | None = None
    """false: at most one call."""

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs; send logprobs: true with it")
        return self

    def tool_use(self) -> ToolUse | None:
        """Return the tools that the answer may call. Raise InvalidRequest."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def generation_options(self) -> GenerationOptions:
        return replace(
            super().generation_options(),
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            max_thinking_tokens=self.thinking_token_budget,
        )


class CompletionBody(OpenAIBody):
    harmless: ClassVar[frozenset[str]] = HARMLESS | {"parallel_tool_calls", "tool_choice"}

    prompt: Annotated[list[Any], BeforeValidator(_prompts, json_schema_input_type=Prompts)]
    """A text, a list of token ids, or a list of either."""
    echo: bool | None = None
    """Begin the answer, and its logprobs, with the prompt (with logprobs up to 2,048 prompt tokens)."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return the log probability of every token, and of this many alternatives."""
    best_of: int | None = None
    """Supported only if equal to n."""
    raw: bool | None = None
    """Read names of control tokens in the prompt as control tokens. A field of Tandem."""

    def check_extras(self, *, strict: bool = False) -> None:
        super().check_extras(strict=strict)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise Unsupported("best_of is only supported when it equals n; leave it out", field="best_of")

    def generation_options(self) -> GenerationOptions:
        return replace(super().generation_options(), num_logprobs=self.logprobs)
