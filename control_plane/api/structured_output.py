"""In which fields do clients ask for structured answers, and which grammar do these mean?

response_format    OpenAI's: {type: text | json_object | json_schema}; the schema bare, as Workers AI takes it, or in
                   OpenAI's {name, schema, strict}. `strict: false` is held to the schema, too.
guided_*           vLLM's: guided_json, guided_regex, guided_choice, guided_grammar (Lark)
structured_outputs vLLM's newer form of the same: {json | regex | choice | grammar | json_object}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from control_plane.api.http.body import Body, ObjectOrText
from tandem_engine.scheduling.grammar import Grammar, GrammarKind
from tandem_runtime.errors import InvalidRequest, Unsupported

_WRAPPER = {"name", "description", "schema", "strict"}


class ResponseFormat(Body):
    type: Annotated[str, Field(json_schema_extra={"enum": ["text", "json_object", "json_schema"]})]
    json_schema: dict[str, Any] | None = None
    """A JSON Schema, or OpenAI's {name, schema, strict} around one."""

    def grammar(self) -> Grammar | None:
        """Return what the answer must match; raises InvalidRequest."""
        if self.type not in ("text", "json_object", "json_schema"):
            raise Unsupported(
                f"response_format {self.type!r} is not supported here; send text, json_object or json_schema",
                field="response_format",
            )
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise InvalidRequest(
                "response_format.json_schema goes with type json_schema, and with no other; send both or neither",
                field="response_format",
            )
        if self.json_schema is not None:
            return schema_grammar(_unwrapped(self.json_schema), "response_format")
        return Grammar("json_object") if self.type == "json_object" else None


class StructuredOutputs(Body):
    json_schema: Annotated[ObjectOrText | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def asked(self) -> dict[str, Grammar | None]:
        return {
            "structured_outputs.json": _json_grammar(self.json_schema, "structured_outputs.json"),
            "structured_outputs.regex": _grammar("regex", self.regex, "structured_outputs.regex"),
            "structured_outputs.choice": _choice_grammar(self.choice, "structured_outputs.choice"),
            "structured_outputs.grammar": _grammar("lark", self.grammar, "structured_outputs.grammar"),
            "structured_outputs.json_object": Grammar("json_object") if self.json_object else None,
        }


class StructuredBody(Body):
    """The fields of bodies that ask for a structure; at the most one of them may."""

    response_format: ResponseFormat | None = None
    guided_json: ObjectOrText | None = None
    """As response_format with a JSON Schema, by vLLM's name."""
    guided_regex: str | None = None
    """The answer matches this regular expression (of Rust's kind: no look-around, no back-references)."""
    guided_choice: list[str] | None = None
    """The answer is one of these."""
    guided_grammar: str | None = None
    """The answer is a sentence of this grammar, in llguidance's Lark."""
    structured_outputs: StructuredOutputs | None = None
    """The same by vLLM's newer name: one of json, regex, choice, grammar and json_object."""

    @property
    def wants_json(self) -> bool:
        _, grammar = self.structure()
        return grammar is not None and grammar.kind in ("json_object", "json_schema")

    def structure(self) -> tuple[str, Grammar | None]:
        """Return which field asks for a structure, and what the answer must match; raises InvalidRequest."""
        asked = {
            "response_format": self.response_format.grammar() if self.response_format is not None else None,
            "guided_json": _json_grammar(self.guided_json, "guided_json"),
            "guided_regex": _grammar("regex", self.guided_regex, "guided_regex"),
            "guided_choice": _choice_grammar(self.guided_choice, "guided_choice"),
            "guided_grammar": _grammar("lark", self.guided_grammar, "guided_grammar"),
            **(self.structured_outputs.asked() if self.structured_outputs is not None else {}),
        }
        found = {name: grammar for name, grammar in asked.items() if grammar is not None}
        if len(found) > 1:
            raise InvalidRequest(f"{' and '.join(found)} exclude each other; send one of them", field=list(found)[1])
        return next(iter(found.items()), ("response_format", None))


def schema_grammar(schema: dict[str, Any], field: str) -> Grammar:
    """Return the grammar of a JSON Schema that `field` holds; raises InvalidRequest if it is too large or deep."""
    if "x-guidance" in schema:
        raise Unsupported(f"{field} has x-guidance, which is not supported here; take it out", field=field)
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise InvalidRequest(f"{field} is nested too deeply; make it flatter", field=field) from error
    return _made("json_schema", text, field)


def _unwrapped(given: dict[str, Any]) -> dict[str, Any]:
    if "schema" not in given and (not given or given.keys() - _WRAPPER):  # no JSON Schema has a keyword `schema`
        return given
    if unknown := sorted(given.keys() - _WRAPPER):
        field = f"response_format.json_schema.{unknown[0]}"
        raise InvalidRequest(f"{field} does not go beside schema; put it into that, or leave it out", field=field)
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest("response_format.json_schema has no schema; send an object", field="response_format")
    return schema


def _json_grammar(given: dict[str, Any] | str | None, field: str) -> Grammar | None:
    if given is None:
        return None
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field} is no JSON: {error}", field=field) from error
    if not isinstance(given, dict):
        raise InvalidRequest(f"{field} is no JSON Schema; send an object", field=field)
    return schema_grammar(given, field)


def _choice_grammar(choices: Sequence[str] | None, field: str) -> Grammar | None:
    if choices is None:
        return None
    if not choices or not all(choices):
        raise InvalidRequest(f"{field} must be a list of texts, none of them empty", field=field)
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    # One lexeme for all: a parser with an item for each would take no more than 2,000.
    return _made("lark", f"start: CHOICE\nCHOICE: {texts}", field)


def _grammar(kind: GrammarKind, text: str | None, field: str) -> Grammar | None:
    if text == "":
        raise InvalidRequest(f"{field} is empty; say what the answer must match, or leave it out", field=field)
    return None if text is None else _made(kind, text, field)


def _made(kind: GrammarKind, text: str, field: str) -> Grammar:
    try:
        return Grammar(kind, text)
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", field=field) from error
