"""Text and calls are separated equally, however an answer is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.text.tools.forms import GENERIC, HERMES, LLAMA3, MISTRAL, ToolForm
from control_plane.text.tools.parser import CallParser

FORMS = (HERMES, LLAMA3, MISTRAL, GENERIC)
Calls = list[tuple[str, str, str]]


def parsed(form: ToolForm, pieces: Sequence[str]) -> tuple[str, Calls, bool]:
    """Return the text, id, name and arguments of every call, and whether all calls are whole."""
    parser = CallParser(form, "id_{}".format)
    text, calls = "", list[list[str]]()
    for piece in [parser.push(piece) for piece in pieces] + [parser.flush()]:
        text += piece.text
        for delta in piece.calls:
            if delta.name is not None:
                assert delta.index == len(calls) and not delta.arguments
                calls.append([delta.call_id, delta.name, ""])
            calls[delta.index][2] += delta.arguments
    return text, [(call_id, name, arguments) for call_id, name, arguments in calls], parser.has_complete_calls


def written(form: ToolForm, calls: Sequence[tuple[str, str]], first: int = 0) -> str:
    objects = [f'{{"name": {json.dumps(name)}, "{form.arguments_key}": {arguments}}}' for name, arguments in calls]
    return form.firsts[first] + form.between.join(objects) + form.last


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_two_calls_come_with_their_arguments_as_they_were_written(form: ToolForm) -> None:
    arguments = '{"a": "}{\\"]</tool_call>", "b": [1.50, {"c": null}]}'
    answer = written(form, [("get", arguments), ("x", "{}")])
    expected = ("", [("id_0", "get", arguments), ("id_1", "x", "{}")], True)
    assert parsed(form, [answer]) == parsed(form, answer) == expected


@pytest.mark.parametrize("form", [HERMES, MISTRAL], ids=lambda form: form.name)
def test_text_before_calls_is_content_without_the_space_between(form: ToolForm) -> None:
    answer = "I look.\n\n" + written(form, [("get", "{}")])
    assert parsed(form, [answer]) == parsed(form, answer) == ("I look.", [("id_0", "get", "{}")], True)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("form", [LLAMA3, MISTRAL], ids=lambda form: form.name)
def test_both_beginnings_of_a_form_are_known(form: ToolForm, first: int) -> None:
    answer = written(form, [("get", "{}")], first)
    assert parsed(form, answer) == ("", [("id_0", "get", "{}")], True)


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (HERMES, "No <tool_cal, no <tool> here \n"),
        (MISTRAL, "[TOOL_CALL] is [TOOL_"),
        (LLAMA3, 'Say {"name": "get", "parameters": {}}'),
        (LLAMA3, "<|python"),
        (GENERIC, '{"tool_call": 3}'),
        (GENERIC, 'So: {"tool_calls": []}'),
        (GENERIC, '{"tool_ca'),
        (GENERIC, ""),
    ],
)
def test_what_is_no_opening_is_text_to_the_last_character(form: ToolForm, answer: str) -> None:
    assert parsed(form, [answer]) == parsed(form, answer) == (answer, [], False)


def test_text_leaves_as_soon_as_it_cannot_open_calls() -> None:
    parser = CallParser(HERMES, "id_{}".format)
    assert [parser.push(piece).text for piece in ("Hi ", "<tool", "s>", " ok")] == ["Hi", "", " <tools>", " ok"]


def test_arguments_leave_as_they_come() -> None:
    parser = CallParser(HERMES, "id_{}".format)
    parser.push('<tool_call>\n{"name": "get", "arguments": ')
    pieces = [parser.push(piece) for piece in ('{"ci', 'ty": ', '"Oslo"}', "}", "\n</tool_call>")]
    assert ["".join(call.arguments for call in piece.calls) for piece in pieces] == ['{"ci', 'ty": ', '"Oslo"}', "", ""]
    assert [call.is_last for piece in pieces for call in piece.calls] == [False, False, False, True]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_an_answer_cut_short_has_a_call_that_is_not_whole(form: ToolForm) -> None:
    answer = written(form, [("get", '{"city": "Oslo"}')])
    text, calls, is_whole = parsed(form, answer[: answer.index("slo")])
    assert (text, calls, is_whole) == ("", [("id_0", "get", '{"city": "O')], False)
    assert parsed(form, answer[: answer.index("get")]) == ("", [], False), "half a name is no call"


@pytest.mark.parametrize(
    "opening", ['{"arguments": {"a": 1}, "name": "get"}', '{"id": "1", "name": "get", "arguments": {"a": 1}}']
)
def test_the_order_of_a_calls_keys_does_not_matter(opening: str) -> None:
    assert parsed(HERMES, f"<tool_call>{opening}</tool_call>")[1] == [("id_0", "get", '{"a": 1}')]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.text(min_size=1, max_size=9), st.dictionaries(st.text(max_size=5), JSON, max_size=3)), max_size=3
)


@given(st.sampled_from(FORMS), st.text(max_size=20), CALLS, st.data())
def test_every_way_of_cutting_an_answer_gives_the_same(
    form: ToolForm, text: str, calls: list[tuple[str, Any]], data: st.DataObject
) -> None:
    written_calls = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    answer = (text if not calls or not form.begins_answer else "") + (written(form, written_calls) if calls else "")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=12)))
    pieces = [answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    whole = parsed(form, [answer])
    assert parsed(form, pieces) == parsed(form, answer) == whole
    assert [(name, arguments) for _, name, arguments in whole[1]] == written_calls
