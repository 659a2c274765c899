"""A grammar accepts exactly a form's calls, and text that is not a call."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from control_plane.text.structure import _bytes
from control_plane.text.tools.call_grammar import call_grammar
from control_plane.text.tools.forms import GENERIC, HERMES, LLAMA3, MISTRAL, ToolForm
from tandem_engine.grammar import Grammar
from tandem_engine.scheduling.grammar_source import limits, source
from tandem_runtime.errors import InvalidRequest
from tests.control_plane.text.tools.test_parser import FORMS, written

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "additionalProperties": False}
TOOLS = [("get", CITY), ("x-1", NOTHING)]
by_name = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


def takes(grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(_bytes(), source(grammar), log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    taken = matcher.try_consume_tokens(list(text.encode()))
    return taken == len(text.encode()) and matcher.is_accepting()


@by_name
def test_calls_are_taken_alone_and_in_a_row(form: ToolForm) -> None:
    grammar = call_grammar(form, TOOLS, {})
    assert takes(grammar, written(form, [("get", '{"city": "Oslo, \\"N\\" }"}')]))
    assert takes(grammar, written(form, [("get", '{"city":"Oslo"}'), ("x-1", "{}"), ("x-1", "{}")]))


@by_name
def test_arguments_keep_to_the_schema_of_their_tool(form: ToolForm) -> None:
    grammar = call_grammar(form, TOOLS, {})
    for name, arguments in (("get", "{}"), ("get", '{"city": 1}'), ("x-1", '{"city": "Oslo"}'), ("y", "{}")):
        assert not takes(grammar, written(form, [(name, arguments)])), (name, arguments)


@by_name
def test_text_that_is_no_call_is_taken_too_unless_calls_are_a_must(form: ToolForm) -> None:
    for text in ("", "Hello {} <b>\n", "你好 [1]"):
        assert takes(call_grammar(form, TOOLS, {}), text)
        assert not takes(call_grammar(form, TOOLS, {}, must_call=True), text)
    assert takes(call_grammar(form, TOOLS, {}, must_call=True), written(form, [("x-1", "{}")]))


@by_name
def test_half_a_call_is_no_text(form: ToolForm) -> None:
    whole = written(form, [("x-1", "{}")])
    assert not takes(call_grammar(form, TOOLS, {}), whole[: whole.index("x-1")])


@by_name
def test_one_call_at_the_most(form: ToolForm) -> None:
    grammar = call_grammar(form, TOOLS, {}, at_most_one=True)
    assert takes(grammar, written(form, [("x-1", "{}")]))
    assert not takes(grammar, written(form, [("x-1", "{}"), ("x-1", "{}")]))


@pytest.mark.parametrize("form", [HERMES, MISTRAL], ids=lambda form: form.name)
def test_text_may_stand_before_calls_where_the_form_has_a_marker(form: ToolForm) -> None:
    assert takes(call_grammar(form, TOOLS, {}), "I look.\n" + written(form, [("x-1", "{}")]))
    assert not takes(call_grammar(form, TOOLS, {}), written(form, [("x-1", "{}")]) + " Done.")


@pytest.mark.parametrize("form", [HERMES, MISTRAL], ids=lambda form: form.name)
def test_text_may_be_held_to_a_schema_of_its_own(form: ToolForm) -> None:
    grammar = call_grammar(form, TOOLS, {}, text=CITY)
    assert takes(grammar, '{"city": "Oslo"}') and takes(grammar, written(form, [("x-1", "{}")]))
    assert not takes(grammar, "Hello")


class Marked:
    """All bytes, a control token, and an end, as llguidance takes a vocabulary."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"<mark>", b"<end>")
    special_token_ids = (256, 257)
    eos_token_id = 257
    bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def takes_marked(grammar: Grammar, tokens: list[int]) -> bool:
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Marked())), source(grammar), log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("form", [HERMES, MISTRAL], ids=lambda form: form.name)
def test_a_marker_that_is_a_control_token_is_that_token(form: ToolForm) -> None:
    (marker,) = form.openings
    grammar = call_grammar(form, TOOLS, {marker: 256})
    rest = written(form, [("x-1", "{}")]).removeprefix(marker).encode()
    assert takes_marked(grammar, [*b"Well. ", 256, *rest])
    assert takes_marked(grammar, [*f"In words: {marker}".encode()]), "its name is text like any other"
    assert not takes_marked(grammar, [256, *b"Well."])


def test_every_call_of_hermes_has_its_own_marker() -> None:
    call = b'\n{"name": "x-1", "arguments": {}}\n</tool_call>'
    assert takes_marked(call_grammar(HERMES, TOOLS, {"<tool_call>": 256}), [256, *call, *b"\n", 256, *call])


def test_llamas_python_tag_is_a_way_to_begin_only_where_it_is_a_control_token() -> None:
    call = written(LLAMA3, [("x-1", "{}")])
    assert not takes(call_grammar(LLAMA3, TOOLS, {}, must_call=True), "<|python_tag|>" + call)
    tagged = call_grammar(LLAMA3, TOOLS, {"<|python_tag|>": 256})
    assert takes_marked(tagged, [256, *call.encode()]) and takes_marked(tagged, [*call.encode()])


def test_json_that_is_no_call_is_text_in_the_generic_form_only() -> None:
    assert takes(call_grammar(GENERIC, TOOLS, {}), '{"city": "Oslo"}')
    for text in ('{"tool_calls": []}', '{"tool_calls":[{"name": "y"}]}', '{"tool_calls" '):
        assert not takes(call_grammar(GENERIC, TOOLS, {}), text), text
    assert not takes(call_grammar(LLAMA3, TOOLS, {}), '{"city": "Oslo"}')


def test_tools_that_are_too_long_together_are_refused() -> None:
    many = [(f"tool_{index}", {"type": "object", "properties": {f"{'p' * 900}": {}}}) for index in range(70)]
    with pytest.raises(InvalidRequest, match="65,536 at the most; send fewer or smaller tools"):
        call_grammar(HERMES, many, {})
