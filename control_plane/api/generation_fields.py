"""Fields that all text-generation bodies share: sampling, structured output, prompt caches, Workers AI's run options.

Structured output, at most one field per request:

response_format    OpenAI's: {type: text | json_object | json_schema}; the schema is bare, as in Workers AI, or in
                   OpenAI's {name, schema, strict}. With `strict: false` the schema holds, too.
guided_*           vLLM's: guided_json, guided_regex, guided_choice, guided_grammar (Lark)
structured_outputs vLLM's newer form: {json | regex | choice | grammar | json_object}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from control_plane.api.http.body import Body, ObjectOrText, check_json_bytes, check_shape, refuse_extras
from control_plane.api.http.bounds import (
    MAX_CHOICES,
    MAX_GUIDED_CHOICES,
    MAX_IGNORED_BYTES,
    MAX_SALT_CHARACTERS,
    MAX_SCHEMA_BYTES,
    MAX_SESSION_CHARACTERS,
    MAX_SHOWN_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TAG_CHARACTERS,
    MAX_TAGS,
)
from control_plane.generation import CACHE_MODES, CacheMode, CachePolicy
from control_plane.text.request import GenerationOptions
from tandem_engine.grammar import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind
from tandem_runtime.errors import InvalidRequest, Unsupported

HARMLESS = frozenset({"user", "prompt_cache_retention", "safety_identifier", "session_id", "tags"})
"""Fields that clients send by habit, and that do not change the answer. `--strict-fields` refuses them, too."""

UNSUPPORTED = frozenset(
    {
        "tools", "functions", "function_call", "audio", "modalities", "prediction", "web_search_options", "suffix",
        "moderation", "logit_processors", "logits_processors",
        "reasoning", "chat_template", "image", "images",
        "chat_template_kwargs", "reasoning_effort", "lora", "input", "requests", "request_id", "use_beam_search",
        "prompt_logprobs", "continue_final_message", "thinking", "conversation", "background", "top_a", "bad_words",
        "mm_processor_kwargs", "return_token_ids", "verbosity",
    }
)  # fmt: skip
"""Fields of other APIs that would change the answer; refused by name."""

_WRAPPER = {"name", "description", "schema", "strict"}
Tag = Annotated[str, Field(max_length=MAX_TAG_CHARACTERS, pattern=r"^[A-Za-z0-9:\-./@]*$")]


class GatewayOptions(Body):
    """Options of Cloudflare's AI Gateway. Tandem has no cache of answers, so every answer is new."""

    for_clients: ClassVar[frozenset[str]] = frozenset(
        {"id", "cacheKey", "cacheTtl", "skipCache", "metadata", "collectLog", "eventId", "retries"}
    )

    requestTimeoutMs: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """The request's timeout in milliseconds; the operator's timeout is the maximum."""


class RunOptions(Body):
    """Workers AI's run options: `options` of a body, and the third argument of `AI.run`. Names are Cloudflare's."""

    for_clients: ClassVar[frozenset[str]] = frozenset(
        {"returnRawResponse", "prefix", "extraHeaders", "sessionOptions", "signal"}
    )
    """The binding handles these options itself."""

    rejectIfBusy: bool | None = None
    """Answer 429 at once, instead of waiting while every worker is busy."""
    queueRequest: Annotated[bool | None, Field(json_schema_extra={"enum": [False, None]})] = None
    """Asynchronous batches are not supported."""
    websocket: Annotated[bool | None, Field(json_schema_extra={"enum": [False, None]})] = None
    """A WebSocket as the answer is not supported."""
    tags: Annotated[list[Tag], Field(max_length=MAX_TAGS, fail_fast=True)] | None = None
    gateway: GatewayOptions | None = None

    def check(self, at: str = "options.") -> None:
        """Raise Unsupported naming an option that is not built."""
        for name, what in (("queueRequest", "asynchronous batches"), ("websocket", "a WebSocket as the answer")):
            if getattr(self, name):
                raise Unsupported(f"{at}{name} is not supported here ({what}); leave it out", field=f"{at}{name}")

    @property
    def timeout_seconds(self) -> float | None:
        gateway = self.gateway
        return gateway.requestTimeoutMs / 1000 if gateway is not None and gateway.requestTimeoutMs else None


class ResponseFormat(Body):
    type: Annotated[str, Field(json_schema_extra={"enum": ["text", "json_object", "json_schema"]})]
    json_schema: dict[str, Any] | None = None
    """A JSON Schema, or OpenAI's {name, schema, strict} around one."""

    def grammar(self) -> Grammar | None:
        """Return the grammar of the answer. Raise InvalidRequest."""
        if self.type not in ("text", "json_object", "json_schema"):
            raise Unsupported(
                f"response_format {self.type[:MAX_SHOWN_CHARACTERS]!r} is not supported here; "
                "send text, json_object or json_schema",
                field="response_format",
            )
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise InvalidRequest(
                "response_format.json_schema needs type json_schema, and that type needs it; send both or neither",
                field="response_format",
            )
        if self.json_schema is not None:
            return _schema_grammar(_unwrapped(self.json_schema), "response_format")
        return Grammar("json_object") if self.type == "json_object" else None


GrammarText = Annotated[str, Field(json_schema_extra={"maxLength": MAX_GRAMMAR_CHARACTERS})]
"""`Grammar` refuses a longer text."""
GuidedChoices = Annotated[list[str], Field(max_length=MAX_GUIDED_CHOICES, fail_fast=True)]


class StructuredOutputs(Body):
    json_schema: Annotated[ObjectOrText | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: GuidedChoices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None

    def requested_grammars(self) -> dict[str, Grammar | None]:
        return {
            "structured_outputs.json": _json_grammar(self.json_schema, "structured_outputs.json"),
            "structured_outputs.regex": _grammar("regex", self.regex, "structured_outputs.regex"),
            "structured_outputs.choice": _choice_grammar(self.choice, "structured_outputs.choice"),
            "structured_outputs.grammar": _grammar("lark", self.grammar, "structured_outputs.grammar"),
            "structured_outputs.json_object": Grammar("json_object") if self.json_object else None,
        }


class StructuredBody(Body):
    """The fields that request a structure. A request may use at most one of them."""

    response_format: ResponseFormat | None = None
    guided_json: ObjectOrText | None = None
    """vLLM's name for response_format with a JSON Schema."""
    guided_regex: GrammarText | None = None
    """The answer matches this regular expression in Rust's syntax, without look-around and back-references."""
    guided_choice: GuidedChoices | None = None
    """The answer is one of these texts."""
    guided_grammar: GrammarText | None = None
    """The answer matches this grammar, in llguidance's Lark dialect."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's newer name for the same: one of json, regex, choice, grammar and json_object."""

    @property
    def wants_json(self) -> bool:
        _, grammar = self.structure()
        return grammar is not None and grammar.kind in ("json_object", "json_schema")

    def structure(self) -> tuple[str, Grammar | None]:
        """Return the field that requests a structure, and the answer's grammar. Raise InvalidRequest."""
        if self.model_fields_set.isdisjoint(_STRUCTURE_FIELDS):
            return "response_format", None
        requested = {
            "response_format": self.response_format.grammar() if self.response_format is not None else None,
            "guided_json": _json_grammar(self.guided_json, "guided_json"),
            "guided_regex": _grammar("regex", self.guided_regex, "guided_regex"),
            "guided_choice": _choice_grammar(self.guided_choice, "guided_choice"),
            "guided_grammar": _grammar("lark", self.guided_grammar, "guided_grammar"),
            **(self.structured_outputs.requested_grammars() if self.structured_outputs is not None else {}),
        }
        found = {name: grammar for name, grammar in requested.items() if grammar is not None}
        if len(found) > 1:
            raise InvalidRequest(f"{' and '.join(found)} exclude each other; send one of them", field=list(found)[1])
        return next(iter(found.items()), ("response_format", None))


_STRUCTURE_FIELDS = frozenset(StructuredBody.model_fields)


def _stop_strings(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else (value or [])
    is_short = isinstance(strings, list) and len(strings) <= MAX_STOP_STRINGS
    if not is_short or not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"must be a string or a list of up to {MAX_STOP_STRINGS} strings, none of them empty")
    if (longest := max(map(len, strings), default=0)) > MAX_STOP_CHARACTERS:
        raise ValueError(f"has a string of {longest:,} characters, the maximum is {MAX_STOP_CHARACTERS:,}; shorten it")
    return strings


def _cache_salt(value: Any) -> Any:
    fits = isinstance(value, str) and 0 < len(value) <= MAX_SALT_CHARACTERS
    if not fits or any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"must be text of 1 to {MAX_SALT_CHARACTERS} characters; leave it out to send none")
    return value


def _cache_mode(value: Any) -> Any:
    if value not in CACHE_MODES:
        raise ValueError(f"must be one of {', '.join(CACHE_MODES)}; leave it out for on")
    return value


def _ignored(value: Any) -> Any:
    return check_json_bytes(value, MAX_IGNORED_BYTES) if isinstance(value, dict) else value


_SERVICE_TIERS = ("auto", "default", "flex", "priority", "scale", "standard_only")
_TIERS: dict[str, Any] = {"enum": [*_SERVICE_TIERS, None]}


def _service_tier(value: Any) -> Any:
    if value is not None and value not in _SERVICE_TIERS:
        raise ValueError(f"must be one of {', '.join(_SERVICE_TIERS)}; leave it out for auto")
    return value


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[
    list[str],
    BeforeValidator(
        _stop_strings,
        json_schema_input_type=_StopString | Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS)] | None,
    ),
]
_CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(Body):
    include_usage: bool | None = None
    """Send one more chunk, with the usage, before [DONE]."""
    include_obfuscation: bool | None = None
    """Accepted without effect."""
    continuous_usage_stats: bool | None = None
    """With include_usage: every chunk has the usage so far. vLLM's field."""


class TextBody(StructuredBody):
    """The fields that OpenAI's and Workers AI's bodies share. null means that the field is absent."""

    harmless: ClassVar[frozenset[str]] = HARMLESS
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED
    remedies: ClassVar[Mapping[str, str]] = {
        "tools": "send them to /chat/completions",
        "functions": "send tools",
        "function_call": "send tool_choice",
    }

    stream: bool | None = None
    """Answer with server-sent events."""
    stream_options: StreamOptions | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from the likeliest tokens that together have this probability."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample only tokens whose probability is at least this share of the likeliest token's."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    """Above 1, tokens of the prompt and of the answer become less likely."""
    frequency_penalty: Penalty | None = None
    """Above 0, tokens become less likely with each occurrence in the answer."""
    presence_penalty: Penalty | None = None
    """Above 0, tokens that occur in the answer become less likely."""
    stop: StopStrings = Field(default_factory=list)
    """The answer ends before the first of these strings."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    """The answer ends before the first of these tokens."""
    ignore_eos: bool | None = None
    """The model's end token does not end the answer."""
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """The model cannot end the answer before it has this many tokens."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Number of answers."""
    cache_salt: Annotated[str, BeforeValidator(_cache_salt, json_schema_input_type=_CacheSalt)] | None = None
    """Share the prompt's cache only with requests of the account with the same salt. The answer does not change."""
    prompt_cache: Annotated[CacheMode, BeforeValidator(_cache_mode, json_schema_input_type=CacheMode)] | None = None
    """Use of the prompt caches: `on`, `read` (write nothing), `write` (read nothing), `off` (neither)."""
    prompt_cache_tokens: Annotated[int, Field(ge=0)] | None = None
    """Read from caches and write to them only this many leading tokens of the prompt."""
    metadata: Annotated[dict[str, Any], BeforeValidator(_ignored)] | None = None
    """Checked, and kept nowhere."""
    store: Annotated[bool | None, Field(json_schema_extra={"enum": [False, None]})] = None
    """Answers are not stored, so `true` is refused."""
    service_tier: Annotated[str | None, BeforeValidator(_service_tier), Field(json_schema_extra=_TIERS)] = None
    """`flex`: served while no other class waits. `priority`: served first, if the account may. Others: as default."""
    prompt_cache_key: Annotated[str, Field(max_length=MAX_SESSION_CHARACTERS)] | None = None
    """Requests of an account for a model with the same key go to the same workers, as with x-session-affinity."""
    options: RunOptions | None = None
    """Workers AI's run options."""

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def wants_continuous_usage(self) -> bool:
        return self.wants_usage_chunk and self.stream_options.continuous_usage_stats is True  # type: ignore[union-attr]

    def check_extras(self, *, strict: bool = False) -> None:
        """Raise InvalidRequest naming a field that would change the answer and is not built.

        `strict` also refuses fields that change nothing.
        """
        if self.options is not None:
            self.options.check()
        if self.store:
            raise Unsupported("store is not supported here: answers are not stored; leave it out", field="store")
        self.structure()
        refuse_extras(self, strict=strict)

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


def strictest(*options: RunOptions | None) -> tuple[bool, float | None]:
    """Return `reject_if_busy` and the timeout in seconds that these run options together ask for."""
    given = [each for each in options if each is not None]
    timeouts = [each.timeout_seconds for each in given if each.timeout_seconds is not None]
    return any(each.rejectIfBusy for each in given), min(timeouts, default=None)


def _schema_grammar(schema: dict[str, Any], field: str) -> Grammar:
    """Return the grammar of the JSON Schema in `field`. Raise InvalidRequest if it is too large or too deep."""
    if "x-guidance" in schema:
        raise Unsupported(f"{field} has x-guidance, which is not supported here; remove it", field=field)
    try:
        check_json_bytes(schema, MAX_SCHEMA_BYTES)
    except ValueError as error:
        raise InvalidRequest(f"{field} {error}", field=field) from error
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise InvalidRequest(f"{field} is nested too deeply; make it flatter", field=field) from error
    return _checked_grammar("json_schema", text, field)


def _unwrapped(value: dict[str, Any]) -> dict[str, Any]:
    if "schema" not in value and (not value or value.keys() - _WRAPPER):  # no JSON Schema has a keyword `schema`
        return value
    if unknown := sorted(value.keys() - _WRAPPER):
        field = f"response_format.json_schema.{unknown[0][:MAX_SHOWN_CHARACTERS]}"
        raise InvalidRequest(f"{field} is not a field beside schema; move it into schema, or leave it out", field=field)
    schema = value.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest("response_format.json_schema has no schema; send an object", field="response_format")
    return schema


def _json_grammar(value: dict[str, Any] | str | None, field: str) -> Grammar | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field} is not JSON: {error}", field=field) from error
        if isinstance(value, dict):
            check_shape(value, field, field)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} is not a JSON Schema; send an object", field=field)
    return _schema_grammar(value, field)


def _choice_grammar(choices: Sequence[str] | None, field: str) -> Grammar | None:
    if choices is None:
        return None
    if not choices or not all(choices):
        raise InvalidRequest(f"{field} must be a list of texts, none of them empty", field=field)
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    # One lexeme for all choices: with one parser item per choice, the limit would be 2,000 choices.
    return _checked_grammar("lark", f"start: CHOICE\nCHOICE: {texts}", field)


def _grammar(kind: GrammarKind, text: str | None, field: str) -> Grammar | None:
    if text == "":
        raise InvalidRequest(f"{field} is empty; send what the answer must match, or leave it out", field=field)
    return None if text is None else _checked_grammar(kind, text, field)


def _checked_grammar(kind: GrammarKind, text: str, field: str) -> Grammar:
    try:
        return Grammar(kind, text)
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", field=field) from error
