"""Converts grammars to the form that llguidance reads, for gateways (which check them) and engines (which apply them).

llguidance (https://github.com/guidance-ai/llguidance) compiles a grammar to an Earley parser over a lexer, and walks
the vocabulary's trie with both. Only this module and tandem_engine/execution/grammar import it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from llguidance import LLMatcher, LLParserLimits

from tandem_engine.grammar import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # a type of its stubs only


class LimitValues(TypedDict):
    """The names are those of llguidance."""

    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    max_grammar_size: int
    verbose_errors: bool


_JSON: JsonCompileOptions = {
    # At most one space, or a new line and its indentation: models write that, and whitespace cannot go on for ever.
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n {0,24}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
LIMITS: LimitValues = {
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Limits of one grammar: compiling it, or using a part of it for the first time, takes some tens of ms at most."""
_ANY_OBJECT = '{"type":"object"}'


class GrammarUnusable(ValueError):
    """This grammar is wrong or too complex; the message names what and where."""


def source(grammar: Grammar) -> str:
    """Return the grammar as `LLMatcher` reads it; raises GrammarUnusable for a JSON Schema that is no JSON object."""
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    try:
        return LLMatcher.grammar_from_json_schema(grammar.text or _ANY_OBJECT, overrides=_JSON)
    except ValueError as error:
        raise GrammarUnusable(f"the JSON Schema cannot be read: {error}") from error


def nested_json(schema: Mapping[str, Any]) -> str:
    """Return the Lark expression for an instance of a JSON Schema."""
    return f"%json {json.dumps({'x-guidance': _JSON, **schema}, ensure_ascii=False, separators=(',', ':'))}"


def limits() -> LLParserLimits:
    """Return `LIMITS` in the form of llguidance's Python classes."""
    return LLParserLimits(**LIMITS)
