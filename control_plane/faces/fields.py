"""Which fields do all text-generation bodies share, and which of others' fields do no harm?"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from control_plane.cache_policy import CACHE_MODES, CacheMode, CachePolicy
from control_plane.faces.body import Body, refuse_extras
from control_plane.text.request import GenerationOptions
from runtime.errors import Unsupported

MAX_CHOICES = 128
_MAX_STOP_STRINGS = 16
_MAX_SALT_CHARACTERS = 256

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "parallel_tool_calls", "verbosity", "tool_choice", "session_id", "tags", "return_token_ids",
    }
)  # fmt: skip
"""Fields that change nothing about the answer, or nothing without others that are refused."""

UNSUPPORTED = frozenset(
    {
        "tools", "functions", "function_call", "audio", "modalities", "prediction", "web_search_options", "suffix",
        "logit_processors", "logits_processors", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "structured_outputs", "reasoning_effort", "reasoning", "chat_template", "chat_template_kwargs", "lora", "image",
        "images", "input", "requests", "request_id", "use_beam_search", "prompt_logprobs", "continue_final_message",
        "thinking", "conversation", "background", "top_a", "bad_words", "mm_processor_kwargs",
    }
)  # fmt: skip
"""Fields that are known elsewhere and would change the answer."""


def _stop_strings(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else (value or [])
    fits = isinstance(strings, list) and all(isinstance(string, str) and string for string in strings)
    if not fits or len(strings) > _MAX_STOP_STRINGS:
        raise ValueError(f"must be a string or a list of up to {_MAX_STOP_STRINGS} strings, none of them empty")
    return strings


def _cache_salt(value: Any) -> Any:
    fits = isinstance(value, str) and 0 < len(value) <= _MAX_SALT_CHARACTERS
    if not fits or any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"must be text of 1 to {_MAX_SALT_CHARACTERS} characters; leave it out to send none")
    return value


def _cache_mode(value: Any) -> Any:
    if value not in CACHE_MODES:
        raise ValueError(f"must be one of {', '.join(CACHE_MODES)}; leave it out for on")
    return value


StopStrings = Annotated[list[str], BeforeValidator(_stop_strings)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(Body):
    type: str


class TextBody(Body):
    """What the OpenAI and the Workers AI bodies have in common; null is "not said" everywhere."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    cache_salt: Annotated[str, BeforeValidator(_cache_salt)] | None = None
    """vLLM's. This and the next two are ours: none of them changes the answer."""
    prompt_cache: Annotated[CacheMode, BeforeValidator(_cache_mode)] | None = None
    prompt_cache_tokens: Annotated[int, Field(ge=0)] | None = None
    response_format: ResponseFormat | None = None
    options: dict[str, Any] | None = None

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    def check_extras(self) -> None:
        """Refuse by name what would change the answer and is not built; raises InvalidRequest."""
        refuse_extras(self, unsupported=UNSUPPORTED, harmless=HARMLESS)
        if self.response_format is not None and self.response_format.type != "text":
            raise Unsupported(
                f"response_format {self.response_format.type!r} is not supported here; leave it out or send 'text'",
                field="response_format",
            )

    def shared_options(self) -> GenerationOptions:
        return GenerationOptions(
            top_p=self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            num_choices=self.n or 1,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos or False,
            min_tokens=self.min_tokens or 0,
            cache=CachePolicy.of(self.prompt_cache or "on", self.prompt_cache_tokens),
            cache_salt=self.cache_salt or "",
        )


def _text_of_parts(value: Any) -> Any:
    """Join a list of text parts; any other part is refused by name."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type", "without a type") if isinstance(part, dict) else "that is no object"
            raise ValueError(f"has a part {kind}; only {{type: 'text', text: '...'}} parts are supported")
    return "\n".join(part["text"] for part in value)


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, BeforeValidator(_text_of_parts)] = None
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """Return what templates read; few know the role `developer`, which is a newer word for `system`."""
        named = {"name": self.name} if self.name else {}
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content or "", **named}


def messages_for_template(messages: list[Message]) -> tuple[dict[str, str], ...]:
    """Return the messages as templates read them; raises InvalidRequest naming a field that is not built."""
    for index, message in enumerate(messages):
        unsupported = ("tool_calls", "tool_call_id", "function_call", "audio", "refusal", "reasoning_content")
        refuse_extras(message, unsupported=unsupported, harmless=("annotations",), at=f"messages[{index}].")
    return tuple(message.for_template() for message in messages)
