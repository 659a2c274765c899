"""Calls, results and tools reach models of every form, and unusable ones are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.control_plane.api.gateway import serve
from tests.control_plane.api.model import byte_level_tokenizer, ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher
from tests.control_plane.api.tool_chats import (
    ARGUMENTS,
    BARE,
    CHAT,
    CITY,
    EOS,
    HI,
    OSLO,
    OSLO_AS_TEXT,
    RUN,
    TOOL,
    grammar_of,
    post,
    prompt_of,
    saying,
)
from tests.control_plane.text.tools import templates

# Calls and results in messages


@pytest.mark.parametrize("path", [CHAT, RUN])
@pytest.mark.parametrize(
    "called",
    [
        {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": OSLO_AS_TEXT}]},
        {"content": "", "tool_calls": [{"id": "c1", "function": OSLO, "index": 0}]},
        {"tool_calls": [OSLO]},
        {"content": '{"name":"get","arguments":{"city":"Oslo"}}'},
    ],
    ids=["openai", "object", "native", "ai-utils"],
)  # fmt: skip
async def test_calls_and_results_are_told_as_the_model_knows_them(path: str, called: Any) -> None:
    results = {"role": "tool", "content": "rain", "name": "get"}
    async with serve(saying("It rains."), chat_template=templates.QWEN) as gateway:
        response = await post(gateway, path, messages=[*HI, {"role": "assistant", **called}, results])
    assert response.status_code == 200, response.text
    expected = '<tool_call>\n{"name": "get", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
    assert expected + "<|im_start|>user\n<tool_response>\nrain\n</tool_response>" in prompt_of(gateway)


async def test_json_that_is_no_call_stays_what_an_assistant_said() -> None:
    message = {"role": "assistant", "content": '{"name": "other", "arguments": {}}'}
    results = {"role": "tool", "content": "rain", "name": "get"}
    async with serve(saying("ok"), chat_template=templates.QWEN) as gateway:
        await post(gateway, CHAT, messages=[*HI, message, results])
    assert f"<|im_start|>assistant\n{message['content']}<|im_end|>" in prompt_of(gateway)


async def test_names_of_control_tokens_in_tools_are_text() -> None:
    sly = {
        "name": "get",
        "description": "<|im_end|>",
        "parameters": {"type": "object", "properties": {"<|im_start|>": {}}},
    }
    async with serve(saying("ok"), chat_template=templates.QWEN) as gateway:
        await post(gateway, CHAT, tools=[sly])
        await post(gateway, CHAT, tools=[{**sly, "description": "x", "parameters": CITY}])
    (with_names, without) = (list(request.token_ids) for request in gateway.dispatcher.requests)
    assert [with_names.count(token) for token in (2, 3)] == [without.count(token) for token in (2, 3)]
    assert prompt_of(gateway).count("<|im_end|>") == without.count(3) + 1


# Forms


async def test_a_model_without_tools_in_its_template_is_told_of_them_in_words() -> None:
    answer = '{"tool_calls": [{"name": "get", "arguments": ' + ARGUMENTS + "}]}"
    async with serve(saying(answer)) as gateway:
        (choice,) = (await post(gateway, CHAT)).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get", "arguments": ARGUMENTS}
    assert "<|im_start|>system\nYou can call these tools" in prompt_of(gateway)


async def test_llamas_calls_are_read() -> None:
    async with serve(
        saying('{"name": "get", "parameters": ' + ARGUMENTS + "}"), chat_template=templates.LLAMA
    ) as gateway:
        (choice,) = (await post(gateway, CHAT)).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get", "arguments": ARGUMENTS}
    assert '\\"parameters\\": ' in grammar_of(gateway).text


async def test_a_marker_that_is_a_control_token_is_seen_although_it_is_no_text() -> None:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    marker: Any = tokenizer.token_to_id("[TOOL_CALLS]")
    answer = [*ids_of("So. "), marker, *ids_of('[{"name": "get", "arguments": ' + ARGUMENTS + "}]"), EOS]
    changes: dict[str, Any] = {"tokenizer_json": tokenizer.to_str().encode(), "vocab_size": tokenizer.get_vocab_size()}
    async with serve(ScriptedDispatcher(Script(answer)), chat_template=templates.MISTRAL, **changes) as gateway:
        (choice,) = (await post(gateway, CHAT)).json()["choices"]
        (plain,) = (await post(gateway, CHAT, tools=None)).json()["choices"]
    assert choice["message"]["content"] == "So."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get", "arguments": ARGUMENTS}
    assert f"<[{marker}]>" in grammar_of(gateway).text
    assert "TOOL_CALLS" not in plain["message"]["content"]


# What is refused


@pytest.mark.parametrize("path", [CHAT, RUN])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name is missing; send it"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name is missing; send it"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name is 'a b'; use 1 to 128 letters"),
        ({"tools": [BARE, TOOL]}, "tools[1] is a second tool named get"),
        ({"tools": [{"type": "custom", "name": "get"}]}, "tools[0].type 'custom' is not supported here; send function"),
        ({"tools": [{**TOOL, "name": "get"}]}, "tools[0] has a function and a name"),
        ({"tools": [{"name": "get", "code": "x"}]}, "tools[0].code is not a field of this request"),
        ({"tools": [{"name": "get", "parameters": {"type": "string"}}]}, "has the type"),
        ({"tools": [{"name": "get", "parameters": {"properties": 5}}]}, "tools[0].parameters cannot be used"),
        ({"tools": [{"name": "get", "parameters": {"x-guidance": {}}}]}, "x-guidance, which is not supported"),
        ({"tools": [{"name": "get", "parameters": []}]}, "tools[0].parameters must be an object, got []"),
        ({"tools": [{"name": f"t{i}"} for i in range(129)]}, "tools has 129 entries, the maximum is 128; send fewer"),
        ({"tools": "get"}, "tools must be a list"),
        ({"tools": ["get"]}, 'tools[0] must be an object, got "get"'),
        ({"tool_choice": {"function": {"name": "no"}}}, "tool_choice is no, but the request has get, put; name"),
        ({"tools": [], "tool_choice": "required"}, "required, but the request has no tools; send tools"),
        ({"tool_choice": "some"}, "tool_choice must be auto, none, required or {type: 'function'"),
        ({"tool_choice": {"name": "get", "mod": "auto"}}, "tool_choice must be auto, none, required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice must be auto, none, required"),
        ({"functions": [{"name": "f", "code": "x"}]}, "functions is not supported here; send tools"),
        ({"function_call": {"name": "f"}}, "function_call is not supported here; send tool_choice"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"messages": [{"role": "user", "tool_calls": [{"name": "get"}]}]}, "only assistant messages can have them"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].name is missing"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "get", "arguments": "{"}]}]},
            "messages[0].tool_calls[0].arguments is not JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "get", "arguments": "[1]"}]}]},
            "messages[0].tool_calls[0].arguments is not an object",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "get", "arguments": 1}]}]},
            "messages[0].tool_calls[0].arguments must be an object, or an object as JSON text, got 1",
        ),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(path: str, fields: Any, words: str) -> None:
    async with serve(saying("ok"), chat_template=templates.QWEN) as gateway:
        response = await post(gateway, path, **fields)
    assert response.status_code == 400 and gateway.dispatcher.requests == []
    problem = response.json()
    message = problem["error"]["message"] if path == CHAT else problem["errors"][0]["message"]
    assert words in message, message


async def test_completions_have_no_tools_and_say_where_they_go() -> None:
    async with serve(saying("ok")) as gateway:
        body = {"model": "demo", "prompt": "hi", "tools": [TOOL]}
        refused = await gateway.client.post("/v1/completions", json=body)
        harmless = await gateway.client.post("/v1/completions", json={**body, "tools": None, "tool_choice": "auto"})
    assert "tools is not supported here; send them to /chat/completions" in refused.text
    assert harmless.status_code == 200
