"""Tools have the meaning of each endpoint's API, and calls have the format that its clients expect."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from control_plane.text.tools.planning import call_id
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.tool_chats import (
    ARGUMENTS,
    BARE,
    CALL,
    CHAT,
    CUT,
    HI,
    OTHER,
    RUN,
    TOOL,
    TWO,
    events,
    grammar_of,
    post,
    prompt_of,
    saying,
)
from tests.control_plane.text.tools import templates

# OpenAI


async def test_calls_are_whole_in_a_message() -> None:
    async with serve(saying(TWO), chat_template=templates.QWEN) as gateway:
        (choice,) = (await post(gateway, CHAT)).json()["choices"]
        (alone,) = (await post(gateway, CHAT, tools=[TOOL], n=1, stop=['<tool_call>\n{"name": "put'])).json()["choices"]
    message = choice["message"]
    assert message["content"] == "I look." and choice["finish_reason"] == "tool_calls"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get", "arguments": ARGUMENTS},
        {"name": "put", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert [call["function"]["name"] for call in alone["message"]["tool_calls"]] == ["get"], (
        "a stop string ends calls too"
    )


async def test_a_message_that_only_calls_has_no_content() -> None:
    async with serve(saying(CALL), chat_template=templates.QWEN) as gateway:
        (choice,) = (await post(gateway, CHAT)).json()["choices"]
    assert choice["message"]["content"] is None and len(choice["message"]["tool_calls"]) == 1


async def test_an_answer_without_calls_is_as_ever() -> None:
    async with serve(saying("Hello {}\n"), chat_template=templates.QWEN) as gateway:
        (choice,) = (await post(gateway, CHAT)).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello {}\n", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_calls_stream_as_deltas_that_the_sdk_puts_together() -> None:
    base: Any = {"model": "demo", "messages": HI, "tools": [TOOL, OTHER]}
    async with (
        serve(saying(TWO), chat_template=templates.QWEN) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client,
        client.chat.completions.stream(**base) as stream,
    ):
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        put_together = (await stream.get_final_completion()).choices[0]
    deltas = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    firsts = [delta for delta in deltas if delta.id is not None]
    assert [(each.index, each.type, each.function and each.function.name) for each in firsts] == [
        (0, "function", "get"),
        (1, "function", "put"),
    ]
    assert all(each.function and each.function.arguments == "" for each in firsts)
    pieces = [each.function.arguments for each in deltas if each.index == 0 and each.function and each.id is None]
    assert len(pieces) > 3 and "".join(piece or "" for piece in pieces) == ARGUMENTS
    assert put_together.message.content == "I look." and put_together.finish_reason == "tool_calls"
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])


async def test_a_stream_that_only_calls_never_says_empty_content() -> None:
    async with serve(saying(CALL), chat_template=templates.QWEN) as gateway:
        chunks = events((await post(gateway, CHAT, stream=True)).text)
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert contents == [None] * len(chunks)


async def test_each_choice_calls_for_itself() -> None:
    async with serve(saying(CALL), chat_template=templates.QWEN) as gateway:
        choices = (await post(gateway, CHAT, n=3)).json()["choices"]
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in choices]
    assert len(set(ids)) == 3 and all(len(each) == 29 and each.startswith("call_") for each in ids)
    assert call_id("r", 0, 1) == call_id("r", 0, 1) != call_id("r", 1, 0)


async def test_a_call_that_was_cut_off_says_so_and_shows_what_there_is() -> None:
    async with serve(saying(CALL), chat_template=templates.QWEN) as gateway:
        (choice,) = (await post(gateway, CHAT, max_tokens=CUT)).json()["choices"]
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments and ARGUMENTS.startswith(arguments)


async def test_every_token_has_its_logprob_in_calls_too() -> None:
    def logprobs(choices: list[Any]) -> list[Any]:
        return [entry["token"] for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]

    async with serve(saying(CALL), chat_template=templates.QWEN) as gateway:
        whole = (await post(gateway, CHAT, logprobs=True)).json()
        streamed = events((await post(gateway, CHAT, logprobs=True, stream=True)).text)
    assert len(logprobs(whole["choices"])) == len(ids_of(CALL))
    assert logprobs([choice for chunk in streamed for choice in chunk["choices"]]) == logprobs(whole["choices"])


# What the engine is sent


async def test_the_template_gets_openais_shape_whichever_came() -> None:
    prompts = []
    for tools in ([TOOL], [BARE]):
        async with serve(saying("ok"), chat_template=templates.QWEN) as gateway:
            await post(gateway, CHAT, tools=tools)
        prompts.append(prompt_of(gateway))
    assert prompts[0] == prompts[1] and json.dumps(TOOL) in prompts[0]


@pytest.mark.parametrize("path", [CHAT, RUN])
@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "get"}},
        {"type": "function", "name": "get"},
        {"type": "tool", "name": "get"},
        {"type": "tool", "toolName": "get"},
        {"function": {"name": "get"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}},
    ],
)
async def test_one_tool_may_be_named_in_every_shape_that_clients_have(path: str, choice: Any) -> None:
    async with serve(saying(CALL), chat_template=templates.QWEN) as gateway:
        response = await post(gateway, path, tool_choice=choice)
    assert response.status_code == 200, response.text
    text = grammar_of(gateway).text
    assert text.startswith("start: calls\n") and '\\"get\\"' in text and "put" not in text
    assert '"put"' in prompt_of(gateway), "the others are offered all the same: the prompt stays cached"


@pytest.mark.parametrize("choice", ["required", "any", {"type": "any"}])
async def test_some_call_may_be_required(choice: Any) -> None:
    async with serve(saying(CALL), chat_template=templates.QWEN) as gateway:
        await post(gateway, CHAT, tool_choice=choice)
    text = grammar_of(gateway).text
    assert text.startswith("start: calls\n") and "put" in text and "TEXT" not in text


@pytest.mark.parametrize("choice", ["auto", {"type": "auto"}, None])
async def test_calls_are_up_to_the_model_by_default(choice: Any) -> None:
    async with serve(saying(CALL), chat_template=templates.QWEN) as gateway:
        await post(gateway, CHAT, tool_choice=choice)
    assert grammar_of(gateway).text.startswith("start: TEXT | head")


async def test_none_offers_nothing_and_reads_no_calls() -> None:
    async with serve(saying(CALL), chat_template=templates.QWEN) as gateway:
        (choice,) = (await post(gateway, CHAT, tool_choice="none")).json()["choices"]
    assert choice["message"]["content"] == CALL and "tool_calls" not in choice["message"]
    assert gateway.dispatcher.requests[0].sampling.grammar is None and "get" not in prompt_of(gateway)


async def test_one_call_at_the_most_where_parallel_calls_are_off_or_the_template_takes_one() -> None:
    for template, parallel, is_one in (
        (templates.QWEN, None, False), (templates.QWEN, False, True), (templates.LLAMA, True, True),
    ):  # fmt: skip
        async with serve(saying("ok"), chat_template=template) as gateway:
            await post(gateway, CHAT, parallel_tool_calls=parallel)
        assert ("call)*" not in grammar_of(gateway).text) == is_one


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "tool", "name": "get"}])
async def test_a_choice_may_ask_for_one_call_at_the_most(choice: dict[str, Any]) -> None:
    async with serve(saying("ok"), chat_template=templates.QWEN) as gateway:
        for is_disabled in (False, True):
            await post(gateway, CHAT, tool_choice={**choice, "disable_parallel_tool_use": is_disabled})
    several, one = (str(request.sampling.grammar) for request in gateway.dispatcher.requests)
    assert "call)*" in several and "call)*" not in one


@pytest.mark.parametrize(
    ("property", "words", "held_to"),
    [
        (
            {"type": "array", "uniqueItems": True},
            "keywords that are not supported here: uniqueItems",
            {"type": "array"},
        ),
        ({"type": "string", "pattern": "^(?!a)b"}, "look-around", {"type": "string"}),
        ({"type": "string", "format": "shoe-size"}, "Unknown format: shoe-size", {"type": "string"}),
        ({"$dynamicRef": "#a"}, "keywords that are not supported here: $dynamicRef", None),
    ],
    ids=["keyword", "look-ahead", "format", "no-way"],
)
async def test_what_cannot_be_held_to_is_left_open_or_refused_by_name_where_it_must_hold(
    property: Any, words: str, held_to: Any
) -> None:
    odd = {"name": "odd", "parameters": {"type": "object", "properties": {"a": property}, "required": ["a"]}}
    async with serve(saying("ok"), chat_template=templates.QWEN) as gateway:
        assert (await post(gateway, CHAT, tools=[odd, TOOL])).status_code == 200
        for fields in ({"tools": [{**odd, "strict": True}]}, {"tools": [odd], "tool_choice": "required"}):
            refused = await post(gateway, CHAT, **fields)
            assert refused.status_code == 400 and words in refused.text
            assert refused.json()["error"]["param"] == "tools[0].parameters"
    shape = {"type": "object", "properties": {"a": held_to}, "required": ["a"], "additionalProperties": False}
    (rule,) = [line for line in grammar_of(gateway).text.splitlines() if line.startswith("call_0: ")]
    schema = json.loads(rule.partition("%json ")[2].removesuffix(' "}"'))
    del schema["x-guidance"]
    assert schema == (shape if held_to else {"type": "object"})


async def test_text_without_calls_may_be_held_to_a_schema() -> None:
    json_mode = {"response_format": {"type": "json_object"}}
    async with serve(saying('{"n": 1}'), chat_template=templates.QWEN) as gateway:
        answered = await post(gateway, RUN, **json_mode)
        assert answered.json()["result"]["response"] == {"n": 1}
        assert grammar_of(gateway).text.startswith("start: text | calls\n")
        for choice in ("auto", "required"):
            refused = await post(gateway, CHAT, guided_regex="a+", tool_choice=choice)
            assert "tools can be combined with response_format, and with no other structure" in refused.text
    async with serve(saying("ok"), chat_template=templates.LLAMA) as gateway:
        assert "writes tool calls as JSON" in (await post(gateway, CHAT, **json_mode)).text
        assert (await post(gateway, CHAT, **json_mode, tool_choice="required")).status_code == 200


# Native


async def test_native_calls_have_arguments_as_objects_to_the_digit() -> None:
    call = '<tool_call>\n{"name": "get", "arguments": {"city": 12345678901234567890123}}\n</tool_call>'
    async with serve(saying(call), chat_template=templates.QWEN) as gateway:
        response = await post(gateway, RUN, tools=[BARE])
    result = json.loads(response.text)["result"]
    assert result["tool_calls"] == [{"name": "get", "arguments": {"city": 12345678901234567890123}}]
    assert result["response"] == "" and result["finish_reason"] == "tool_calls"


async def test_native_streams_have_all_calls_in_one_event() -> None:
    async with serve(saying(TWO), chat_template=templates.QWEN) as gateway:
        received = events((await post(gateway, RUN, stream=True)).text)
    (with_calls,) = [event for event in received if "tool_calls" in event]
    assert with_calls["tool_calls"] == [
        {"index": 0, "name": "get", "arguments": json.loads(ARGUMENTS)},
        {"index": 1, "name": "put", "arguments": {}},
    ]
    assert "".join(event["response"] for event in received) == "I look."
    assert received[-1]["finish_reason"] == "tool_calls" and received[-2] == with_calls


async def test_a_native_call_that_was_cut_off_is_an_error() -> None:
    async with serve(saying(CALL), chat_template=templates.QWEN) as gateway:
        response = await post(gateway, RUN, max_tokens=CUT)
        streamed = events((await post(gateway, RUN, max_tokens=CUT, stream=True)).text)
    assert response.status_code == 400
    assert "ended (length) before its call of get did; raise max_tokens" in response.text
    assert streamed[-1]["finish_reason"] == "length" and not any("tool_calls" in event for event in streamed)


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ({"max_tokens": 16}, "ended (length) before its call did; raise max_tokens"),
        ({"stop": ["name"]}, "ended (stop) before its call did; send a stop that does not end the answer early"),
    ],
    ids=["max_tokens", "stop"],
)
async def test_a_native_call_that_was_cut_off_before_its_name_is_an_error(ending: dict[str, Any], words: str) -> None:
    async with serve(saying(CALL.lstrip()), chat_template=templates.QWEN) as gateway:
        response = await post(gateway, RUN, **ending)
    assert response.status_code == 400 and words in response.text


@pytest.mark.parametrize("end", ["{", "get", "Gr", "}"])
async def test_a_native_call_within_which_a_token_ended_the_answer_is_an_error(end: str) -> None:
    """As one of `stop_token_ids` may."""
    answer = CALL[: CALL.index(end) + len(end)]
    async with serve(saying(answer), chat_template=templates.QWEN) as gateway:
        response = await post(gateway, RUN)
        streamed = events((await post(gateway, RUN, stream=True)).text)
    assert response.status_code == 400 and "ended (stop) before its call" in response.text
    assert not any("tool_calls" in event for event in streamed)


async def test_models_of_openais_wire_format_answer_as_openai_does() -> None:
    async with serve(saying(CALL), chat_template=templates.QWEN, wire_format="openai") as gateway:
        whole = (await post(gateway, RUN)).json()["result"]["choices"][0]
        received = events((await post(gateway, RUN, stream=True)).text)
        prompted = await gateway.client.post(RUN, json={"prompt": "hi", "tools": [BARE]})
        alone = await gateway.client.post(RUN, json={"prompt": "hi"})
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "get", "arguments": ARGUMENTS}
    assert prompted.json()["result"]["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert alone.json()["result"]["object"] == "text_completion"
    deltas = [
        call
        for event in received
        if event.get("choices")
        for call in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert "".join(call["function"]["arguments"] for call in deltas) == ARGUMENTS


async def test_a_prompt_may_come_with_tools_unless_it_is_raw() -> None:
    async with serve(saying(CALL), chat_template=templates.QWEN) as gateway:
        response = await gateway.client.post(RUN, json={"prompt": "hi", "tools": [BARE]})
        raw = await gateway.client.post(RUN, json={"prompt": "hi", "raw": True, "tools": [BARE]})
    assert response.json()["result"]["tool_calls"][0]["name"] == "get"
    assert raw.status_code == 400 and "tools need a chat, and the prompt is raw" in raw.text
