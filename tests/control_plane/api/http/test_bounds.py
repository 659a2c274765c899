"""Every list, text and nesting of a body has a bound that its error names, and a wrong body costs little."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.api.chat_fields import messages_for_template
from control_plane.api.http import bounds
from control_plane.api.http.body import check, check_shape, parse_object, refuse_extras
from control_plane.api.openai.schema import ChatBody, CompletionBody
from control_plane.api.openapi.document import document
from control_plane.api.workers_ai.schema import TextGenerationBody
from tandem_runtime.errors import InvalidRequest
from tests.control_plane.api.gateway import serve

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "get", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "get"}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [USER], **fields}


def calling(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "assistant", "tool_calls": [{**CALL, **fields}]}])


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


BEYOND: dict[str, tuple[dict[str, Any], str]] = {
    "messages": (chat(messages=[USER] * 8_193), "messages has 8,193 entries, the maximum is 8,192; send fewer"),
    "parts": (chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 1_025}]), "has 1,025 parts"),
    "calls": (chat(messages=[{"role": "assistant", "tool_calls": [CALL] * 257}]),
              "messages[0].tool_calls has 257 entries, the maximum is 256"),
    "call id": (calling(id="a" * 257), "messages[0].tool_calls[0].id has 257 characters, the maximum is 256"),
    "call name": (calling(function={"name": "a" * 257}), "function.name has 257 characters"),
    "arguments": (calling(function={"name": "get", "arguments": {"a": [1] * 140_000}}), "has 280,007 bytes as JSON"),
    "arguments as text": (calling(function={"name": "get", "arguments": "1" * 270_000}), "has 270,000 bytes as JSON"),
    "author": (chat(messages=[{**USER, "name": "a" * 257}]), "messages[0].name has 257 characters"),
    "tools": (chat(tools=[TOOL] * 129), "tools has 129 entries, the maximum is 128; send fewer"),
    "parameters": (chat(tools=[{"name": "get", "parameters": {"a": "b" * 270_000}}]), "the limit is 262,144"),
    "description": (chat(tools=[{"name": "get", "description": "a" * 65_537}]), "description has 65,537 characters"),
    "stop": (chat(stop=["a"] * 5), "up to 4 strings"),
    "stop string": (chat(stop=["a" * 1_025]), "stop has a string of 1,025 characters, the maximum is 1,024"),
    "stop ids": (chat(stop_token_ids=[1] * 1_025), "stop_token_ids has 1,025 entries"),
    "biases": (chat(logit_bias={str(key): 1 for key in range(4_097)}), "logit_bias has 4,097 entries"),
    "bias": (chat(logit_bias={"1" * 5_000: 1}), "must have token ids as keys"),
    "schema": (chat(guided_json={"const": "a" * 262_200}), "guided_json has 262,212 bytes as JSON"),
    "regex": (chat(guided_regex="a" * 65_537), "guided_regex"),
    "choices": (chat(guided_choice=["a"] * 16_385), "guided_choice has 16,385 entries"),
    "model": (chat(model="a" * 257), "model has 257 characters, the maximum is 256; shorten it"),
    "metadata": (chat(metadata={"a": "b" * 65_529}), "metadata has 65,537 bytes as JSON, the limit is 65,536"),
    "salt": (chat(cache_salt="a" * 257), "1 to 256 characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_what_is_beyond_a_bound_is_refused_by_name_with_the_limit(name: str) -> None:
    value, words = BEYOND[name]
    with pytest.raises(InvalidRequest) as refused:
        _prepare(ChatBody, value)
    assert words in refused.value.message and len(refused.value.message) < 400


@pytest.mark.parametrize(
    ("prompt", "words"),
    [(["a"] * 257, "prompt has 257 prompts, the maximum is 256"), ([1] * 1_048_577, "1,048,577 token ids"),
     ([[1], [1] * 1_048_577], "1,048,577 token ids"), ([1, "a"] * 200, "400 prompts")],
)  # fmt: skip
def test_prompts_have_bounds(prompt: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check(CompletionBody, {"model": "demo", "prompt": prompt})


def test_the_largest_that_is_permitted_is_taken() -> None:
    calls = [{"role": "assistant", "tool_calls": [CALL] * 256}] * 32
    metadata = {"a": "b" * 65_000}
    body = _prepare(ChatBody, chat(messages=[USER] * 8_160 + calls, stop=["a" * 1_024] * 4, metadata=metadata))
    assert len(body.messages) == 8_192
    assert len(check(CompletionBody, {"model": "m", "prompt": [1] * 1_048_576}).prompt[0]) == 1_048_576


def test_the_calls_of_a_chat_have_a_bound_in_all() -> None:
    body = check(ChatBody, chat(messages=[{"role": "assistant", "tool_calls": [CALL] * 256}] * 33))
    with pytest.raises(InvalidRequest, match="8,448 tool calls, the maximum is 8,192"):
        _messages(body)


def _prepare(model: type[ChatBody], value: dict[str, Any]) -> ChatBody:
    body = check(model, value)
    body.check_extras()
    body.tool_use()
    _messages(body)
    return body


def _messages(body: ChatBody) -> None:
    messages_for_template(body.messages)


# ------------------------------------------------------------------------------------------------ what refusals cost

_HOSTILE: dict[str, Callable[[], bytes]] = {
    "numbers for messages": lambda: msgspec.json.encode(chat(messages=[1] * 1_000_000)),
    "empty messages": lambda: msgspec.json.encode(chat(messages=[{}] * 200_000)),
    "messages without content": lambda: msgspec.json.encode(chat(messages=[{"role": "user"}] * 120_000)),
    "numbers for tools": lambda: msgspec.json.encode(chat(tools=[1] * 1_000_000)),
    "numbers for stop ids": lambda: msgspec.json.encode(chat(stop_token_ids=["a"] * 500_000)),
    "numbers for calls": lambda: msgspec.json.encode(
        calling() | {"messages": [{"role": "user", "tool_calls": [1] * 10**6}]}
    ),
    "arguments": lambda: msgspec.json.encode(calling(function={"name": "a", "arguments": {"a": [1] * 1_000_000}})),
    "an unknown field": lambda: msgspec.json.encode(chat(**{"a" * 2_000_000: 1})),
    "a long wrong value": lambda: msgspec.json.encode(chat(temperature="a" * 2_000_000)),
    "a wrong list": lambda: msgspec.json.encode(chat(temperature=[1] * 1_000_000)),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_a_hostile_body_is_refused_without_memory_and_with_a_short_message(name: str) -> None:
    """Beyond the parsed JSON itself, a refusal keeps 5 MB at most: no list of a million errors, no echo."""
    value = msgspec.json.decode(_HOSTILE[name]())
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as refused:
            check(ChatBody, value).check_extras()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(refused.value.message) < 400 and len(refused.value.field) < 100
    assert peak < 5_000_000, f"{peak:,} bytes"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "more than 128 levels deep"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
        (b'{"a": ' + b'{"a":' * 1_000 + b"1" + b"}" * 1_000 + b"}", "128 levels|not valid JSON"),
        (b'{"a": [' + b"[]," * 140_000 + b"[]]}", "more than 131,072 lists and objects"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
)  # fmt: skip
def test_the_shape_of_json_has_bounds(raw: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_object(raw)


def test_the_deepest_and_the_widest_that_are_permitted_are_taken() -> None:
    parse_object(msgspec.json.encode({"a": nested(bounds.MAX_JSON_DEPTH - 1)}))
    parse_object(msgspec.json.encode({"a": [[]] * (bounds.MAX_JSON_CONTAINERS - 3), "b": [1] * 1_000_000}))


keys = st.sampled_from(["a", "b", "c"])  # of no matter here, and slow to make at random


@given(st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner)))
@settings(max_examples=200, deadline=None)
def test_a_shape_is_refused_exactly_when_it_is_deeper_than_the_bound(value: Any) -> None:
    depth = bounds.MAX_JSON_DEPTH - _depth(value)
    check_shape(_around(value, depth))
    with pytest.raises(InvalidRequest):
        check_shape(_around([value] if not isinstance(value, list | dict) else value, depth + 1))


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_depth, items), default=0)


def _around(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def test_json_in_texts_has_the_same_depth() -> None:
    arguments = '{"a": ' + "[" * 200 + "]" * 200 + "}"
    for value in (calling(function={"name": "get", "arguments": arguments}), chat(guided_json=arguments)):
        with pytest.raises(InvalidRequest, match="more than 128 levels deep"):
            _prepare(ChatBody, value)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", chat()), ("/client/v4/accounts/me/ai/run/demo", {"prompt": "hi"})]
)
async def test_an_unknown_field_comes_back_short(path: str, body: dict[str, Any]) -> None:
    async with serve() as gateway:
        answer = await gateway.client.post(path, json={**body, "x" * 100_000: 1})
    assert answer.status_code == 400 and "x" * 60 + "... is not a field" in answer.text and len(answer.text) < 500


def test_an_inner_unknown_field_is_short_too() -> None:
    body = check(ChatBody, chat(messages=[{**USER, "y" * 100_000: 1}]))
    with pytest.raises(InvalidRequest) as refused:
        refuse_extras(body)
    assert len(refused.value.message) < 200 and len(refused.value.field) < 100


def test_the_openapi_document_has_the_bounds() -> None:
    schemas = document("http://x")["components"]["schemas"]
    chat_fields = schemas["ChatBody"]["properties"]
    assert chat_fields["messages"]["maxItems"] == bounds.MAX_MESSAGES and chat_fields["messages"]["minItems"] == 1
    assert chat_fields["model"]["maxLength"] == bounds.MAX_MODEL_CHARACTERS
    assert {"maxItems": bounds.MAX_TOOLS, "items": {"$ref": "#/components/schemas/ToolBody"}, "type": "array"} in (
        chat_fields["tools"]["anyOf"]
    )
    assert str(bounds.MAX_STOP_CHARACTERS) in str(chat_fields["stop"])
    assert str(bounds.MAX_PROMPT_TOKENS) in str(schemas["CompletionBody"]["properties"]["prompt"])
    assert (
        TextGenerationBody.model_json_schema()["properties"]["messages"]["anyOf"][0]["maxItems"] == bounds.MAX_MESSAGES
    )
