"""Tools, calls and results reach a model by its template, or as text where the template lacks them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.text.template import ChatTemplate
from control_plane.text.tool import Tool
from control_plane.text.tools.template_traits import traits_of
from control_plane.text.tools.tool_messages import Message, _paired, messages_for
from tests.control_plane.text.tools import templates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ASKED: dict[str, Any] = {"role": "user", "content": "Weather?"}
CALL: dict[str, Any] = {"id": "call_1", "name": "get", "arguments": {"city": "Zürich"}}
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "content": "rain", "tool_call_id": "call_1"}
CHAT: list[dict[str, Any]] = [ASKED, CALLED, RESULT]
TOOL = Tool("get", "Gets", {"type": "object", "properties": {"city": {"type": "string"}}})


def prepared(source: str, chat: list[dict[str, Any]], tools: tuple[Tool, ...] = ()) -> list[dict[str, Any]]:
    return messages_for(traits_of(source, SPECIAL), chat, tools)


def rendered(source: str, chat: list[dict[str, Any]]) -> str:
    return ChatTemplate(source, SPECIAL).render(prepared(source, chat))


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (templates.QWEN, '<tool_call>\n{"name": "get", "arguments": {"city": "Zürich"}}\n</tool_call>'),
        (templates.ARGUMENTS_AS_TEXT, '<tool_call>\n{"name": "get", "arguments": {"city": "Zürich"}}\n</tool_call>'),
        (templates.LLAMA, '{"name": "get", "parameters": {"city": "Zürich"}}<|eot_id|>'),
        (templates.MISTRAL, '[TOOL_CALLS] [{"name": "get", "arguments": {"city": "Zürich"}, "id": "'),
        (templates.CHATML_WITHOUT_TOOLS, '{"tool_calls": [{"name": "get", "arguments": {"city": "Zürich"}}]}'),
        (templates.GEMMA, '{"tool_calls": [{"name": "get", "arguments": {"city": "Zürich"}}]}'),
    ],
    ids=["qwen", "text", "llama", "mistral", "chatml", "gemma"],
)
def test_a_call_is_told_as_the_model_writes_it(source: str, written: str) -> None:
    text = rendered(source, CHAT)
    assert written in text and "rain" in text


def test_ids_become_nine_letters_where_a_template_wants_that_and_stay_pairs() -> None:
    _, called, result = prepared(templates.MISTRAL, CHAT)
    call_id = called["tool_calls"][0]["id"]
    assert len(call_id) == 9 and call_id.isalnum() and result["tool_call_id"] == call_id
    short = {**CALL, "id": "abcDEF123"}
    kept = prepared(
        templates.MISTRAL, [ASKED, {**CALLED, "tool_calls": [short]}, {**RESULT, "tool_call_id": "abcDEF123"}]
    )
    assert kept[1]["tool_calls"][0]["id"] == kept[2]["tool_call_id"] == "abcDEF123"


def test_calls_and_results_without_ids_are_paired_by_name_then_by_order() -> None:
    calls: list[dict[str, Any]] = [{"name": name, "arguments": {}} for name in ("a", "b", "b")]
    results = [{"role": "tool", "content": content, **ids} for content, ids in
               (("1", {"name": "b"}), ("2", {"name": "a"}), ("3", {}))]  # fmt: skip
    _, called, *answered = prepared(templates.QWEN, [ASKED, {**CALLED, "tool_calls": calls}, *results])
    ids = [call["id"] for call in called["tool_calls"]]
    assert len(set(ids)) == 3
    assert [each["tool_call_id"] for each in answered] == [ids[1], ids[0], ids[2]]
    assert [each["name"] for each in answered] == ["b", "a", "b"]


def test_a_result_has_the_name_of_the_call_that_its_id_tells() -> None:
    assert prepared(templates.QWEN, CHAT)[2]["name"] == "get"


def test_results_are_the_users_words_where_there_is_no_such_role_and_users_take_turns() -> None:
    second = {**RESULT, "content": "snow", "tool_call_id": "call_2"}
    called = {**CALLED, "tool_calls": [CALL, {**CALL, "id": "call_2"}]}
    chat = [ASKED, called, RESULT, second, {"role": "user", "content": "So?"}]
    assert [message["role"] for message in prepared(templates.GEMMA, chat)] == ["user", "assistant", "user"]
    assert prepared(templates.GEMMA, chat)[2]["content"] == "The result of get: rain\nThe result of get: snow\nSo?"


def test_tools_in_words_stand_behind_what_the_system_says() -> None:
    system = {"role": "system", "content": "Be brief."}
    (first, *_) = prepared(templates.CHATML_WITHOUT_TOOLS, [system, ASKED], (TOOL,))
    assert first["role"] == "system" and first["content"].startswith("Be brief.\n\nYou can call these tools")
    assert '{"name": "get", "description": "Gets", "parameters": {"type": "object"' in first["content"]
    assert '{"tool_calls": [{"name": ' in first["content"]
    (made, question) = prepared(templates.CHATML_WITHOUT_TOOLS, [ASKED], (TOOL,))
    assert made["role"] == "system" and question == ASKED


def test_tools_in_words_stand_before_the_first_question_where_there_is_no_system() -> None:
    (first, *_) = prepared(templates.GEMMA, CHAT, (TOOL,))
    assert first["role"] == "user" and first["content"].endswith("\n\nWeather?") and '"get"' in first["content"]


def test_a_chat_without_calls_is_left_as_it_is() -> None:
    chat = [{"role": "system", "content": "Be brief."}, ASKED, {"role": "assistant", "content": "It rains."}]
    for source in (templates.QWEN, templates.MISTRAL, templates.GEMMA):
        assert prepared(source, chat) == chat


# ------------------------------------------------------------------------------------------------ pairing costs little


def _paired_by_search(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Pair by searching all open calls for each result: simple, and quadratic."""
    open_calls: list[dict[str, Any]] = []
    num_calls = 0
    for message in messages:
        paired = dict(message)
        if message.get("tool_calls"):
            calls = [{"id": f"call_{num_calls + at}", **call} for at, call in enumerate(message["tool_calls"])]
            num_calls += len(calls)
            paired["tool_calls"] = calls
            open_calls += calls
        elif message["role"] == "tool":
            call_id, name = message.get("tool_call_id"), message.get("name")
            if call_id:
                call = next((call for call in open_calls if call["id"] == call_id), None)
            else:
                call = next((call for call in open_calls if name in (None, call["name"])), None)
            if call is not None:
                open_calls.remove(call)
                paired |= {"name": call["name"], "tool_call_id": call["id"]}
        yield paired


_IDS, _NAMES = st.sampled_from(["a", "b", "call_0", "call_1", "call_2"]), st.sampled_from(["get", "put", ""])
_CALLS = st.fixed_dictionaries({"name": _NAMES, "arguments": st.just({})}, optional={"id": _IDS})
_MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.just("assistant"), "tool_calls": st.lists(_CALLS, max_size=4)}),
    st.fixed_dictionaries({"role": st.just("tool")}, optional={"tool_call_id": _IDS, "name": _NAMES}),
    st.just({"role": "user", "content": "hi"}),
)


@given(st.lists(_MESSAGES, max_size=20))
def test_pairs_are_those_of_a_search_through_all_open_calls(messages: list[dict[str, Any]]) -> None:
    assert list(_paired(messages)) == list(_paired_by_search(messages))


class CountedText(str):
    """Counts how often texts are compared."""

    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedText.num_comparisons += 1
        return str.__eq__(self, str(other))

    __hash__ = str.__hash__


@pytest.mark.parametrize("key", ["tool_call_id", "name", "order"])
def test_sixteen_thousand_calls_are_paired_with_a_few_comparisons_each(key: str) -> None:
    num = 16_000
    names = [CountedText(f"tool_{at}") for at in range(num)]
    calls = [{"id": CountedText(f"id_{at}"), "name": name, "arguments": {}} for at, name in enumerate(names)]
    results: list[dict[str, Any]] = [{"role": "tool", "content": ""} for _ in range(num)]
    for at, result in enumerate(results):
        if key != "order":  # the last call first: the worst for a search from the beginning
            result[key] = CountedText(f"id_{num - 1 - at}" if key == "tool_call_id" else f"tool_{num - 1 - at}")
    CountedText.num_comparisons = 0
    paired = list(_paired([{"role": "assistant", "tool_calls": calls}, *results]))
    assert CountedText.num_comparisons < 4 * num
    order = range(num) if key == "order" else reversed(range(num))
    assert [message["tool_call_id"] for message in paired[1:]] == [f"id_{at}" for at in order]
