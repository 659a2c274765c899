"""How does a grammar look to llguidance, in the gateway that checks it and in the engine that applies it?

llguidance (https://github.com/guidance-ai/llguidance) compiles a grammar to an Earley parser over a lexer, and walks
the vocabulary's trie with both. It is imported here and in tandem_engine/execution/grammar only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from llguidance import LLMatcher, LLParserLimits

from tandem_engine.scheduling.grammar import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # a type of its stubs only


class LimitValues(TypedDict):
    """By llguidance's names."""

    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    max_grammar_size: int
    verbose_errors: bool


_JSON: JsonCompileOptions = {
    # At most one space, or a new line and its indentation: what models write, and no answer is whitespace for ever.
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
"""What one grammar may cost: a step that compiles it or first needs a part of it, some tens of ms."""
_ANY_OBJECT = '{"type":"object"}'


class GrammarUnusable(ValueError):
    """This grammar is wrong, or too complex; the message says what and where."""


def source(grammar: Grammar) -> str:
    """Return what `LLMatcher` takes; raises GrammarUnusable for a JSON Schema that is no JSON object."""
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    try:
        return LLMatcher.grammar_from_json_schema(grammar.text or _ANY_OBJECT, overrides=_JSON)
    except ValueError as error:
        raise GrammarUnusable(f"the JSON Schema cannot be read: {error}") from error


def nested_json(schema: Mapping[str, Any]) -> str:
    """Return what stands for an instance of a JSON Schema in a Lark grammar."""
    return f"%json {json.dumps({'x-guidance': _JSON, **schema}, ensure_ascii=False, separators=(',', ':'))}"


def limits() -> LLParserLimits:
    """Return `LIMITS` as llguidance's Python classes take them."""
    return LLParserLimits(**LIMITS)
