"""Which fields do all text-generation bodies share, and which of others' fields do no harm?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from control_plane.api.http.body import Body, refuse_extras
from control_plane.api.structured_output import StructuredBody
from control_plane.api.workers_ai.run_options import RunOptions
from control_plane.cache_policy import CACHE_MODES, CacheMode, CachePolicy
from control_plane.text.request import GenerationOptions

MAX_CHOICES = 128
_MAX_STOP_STRINGS = 4
_MAX_SALT_CHARACTERS = 256

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "session_id", "tags",
    }
)  # fmt: skip
"""Fields that change nothing about the answer, or nothing without others that are refused."""

UNSUPPORTED = frozenset(
    {
        "tools", "functions", "function_call", "audio", "modalities", "prediction", "web_search_options", "suffix",
        "moderation", "logit_processors", "logits_processors", "reasoning_effort",
        "reasoning", "chat_template", "image", "images",
        "chat_template_kwargs", "lora", "input", "requests", "request_id", "use_beam_search", "prompt_logprobs",
        "continue_final_message", "thinking", "conversation", "background", "top_a", "bad_words",
        "mm_processor_kwargs", "return_token_ids", "verbosity",
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


_StopString = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[
    list[str],
    BeforeValidator(
        _stop_strings,
        json_schema_input_type=_StopString | Annotated[list[_StopString], Field(max_length=_MAX_STOP_STRINGS)] | None,
    ),
]
_CacheSalt = Annotated[str, Field(min_length=1, max_length=_MAX_SALT_CHARACTERS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(Body):
    include_usage: bool | None = None
    """One more chunk, with the usage, before [DONE]."""
    include_obfuscation: bool | None = None
    """Taken, and changes nothing."""


class TextBody(StructuredBody):
    """What the OpenAI and the Workers AI bodies have in common; null is "not said" everywhere."""

    harmless: ClassVar[frozenset[str]] = HARMLESS
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED
    remedies: ClassVar[Mapping[str, str]] = {
        "tools": "send them to /chat/completions",
        "functions": "send tools",
        "function_call": "send tool_choice",
    }

    stream: bool | None = None
    """Server-sent events instead of one answer."""
    stream_options: StreamOptions | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Draw from the likeliest tokens that together have this probability."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Draw only tokens that are this likely, measured at the likeliest."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    """Above 1, tokens of prompt and answer become less likely."""
    frequency_penalty: Penalty | None = None
    """Above 0, tokens become less likely each time they occur in the answer."""
    presence_penalty: Penalty | None = None
    """Above 0, tokens that occur in the answer become less likely."""
    stop: StopStrings = Field(default_factory=list)
    """The answer ends before the first of these."""
    stop_token_ids: list[TokenId] | None = None
    """The answer ends before the first of these tokens."""
    ignore_eos: bool | None = None
    """The model's own end does not end the answer."""
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """The answer cannot end by itself before it has as many tokens."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """How many answers."""
    cache_salt: Annotated[str, BeforeValidator(_cache_salt, json_schema_input_type=_CacheSalt)] | None = None
    """Only requests of the account with the same salt share the prompt's cache. The answer stays the same."""
    prompt_cache: Annotated[CacheMode, BeforeValidator(_cache_mode, json_schema_input_type=CacheMode)] | None = None
    """`read` leaves nothing in the prompt caches, `write` takes nothing from them, `off` neither."""
    prompt_cache_tokens: Annotated[int, Field(ge=0)] | None = None
    """Only so many leading tokens of the prompt are taken from caches or left there."""
    options: RunOptions | None = None
    """Workers AI's run options."""

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    def check_extras(self) -> None:
        """Refuse by name what would change the answer and is not built; raises InvalidRequest."""
        if self.options is not None:
            self.options.check()
        self.structure()
        refuse_extras(self)

    def shared_options(self) -> GenerationOptions:
        grammar_field, grammar = self.structure()
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
            grammar=grammar,
            grammar_field=grammar_field,
            cache=CachePolicy.of(self.prompt_cache or "on", self.prompt_cache_tokens),
            cache_salt=self.cache_salt or "",
        )
