"""The built-in model calls tools for common clients, also when a worker dies meanwhile."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import jsonschema_rs
import openai
import pytest
import pytest_asyncio

from control_plane.accounts.identity import Caller
from control_plane.generation import CachePolicy
from control_plane.text.request import ChatRequest, GenerationOptions
from control_plane.text.text_service import TextService
from control_plane.text.tool import Tool, ToolUse
from tandem_client import AsyncAI
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet
from tests.system.streams import MODEL, client, run, stream

pytestmark = pytest.mark.asyncio(loop_scope="session")


def function(name: str, description: str, **parameters: str) -> Any:
    properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


WEATHER = function("get_weather", "Get the weather in a city", city="string")
TIMER = function("set_timer", "Start a timer", minutes="integer")
OSLO: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
RESULT = '{"temperature": 12, "sky": "sunny"}'
ASK: dict[str, Any] = {"model": MODEL, "messages": OSLO, "tools": [WEATHER, TIMER], "temperature": 0, "max_tokens": 80}


@pytest_asyncio.fixture(loop_scope="session")
async def sdk(demo_fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{demo_fleet.base_url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


async def test_openais_sdk_gets_a_call_answers_it_and_gets_the_answer(sdk: openai.AsyncOpenAI) -> None:
    whole = (await sdk.chat.completions.create(**ASK)).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    messages = [*OSLO, whole.message.model_dump(exclude_none=True), result]
    answer = (await sdk.chat.completions.create(**{**ASK, "messages": messages})).choices[0]
    assert answer.message.content == "It is 12 degrees and sunny in Oslo." and answer.finish_reason == "stop"


async def test_openais_sdk_streams_the_call_that_it_gets_whole(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(**ASK, stream_options={"include_usage": True}) as events:
        kinds = [event.type async for event in events]
        streamed = await events.get_final_completion()
    whole = await sdk.chat.completions.create(**ASK)
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    calls = [(choice.message.tool_calls or [])[0].function for choice in (streamed.choices[0], whole.choices[0])]
    assert (calls[0].name, calls[0].arguments) == (calls[1].name, calls[1].arguments)
    assert streamed.usage is not None and whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("question", ["Hello!", "What is the weather in Oslo?"])
async def test_tool_choice_is_obeyed_whatever_the_model_would_rather_do(sdk: openai.AsyncOpenAI, question: str) -> None:
    ask = {**ASK, "messages": [{"role": "user", "content": question}]}
    named: Any = {"type": "function", "function": {"name": "set_timer"}}
    (forced,) = (await sdk.chat.completions.create(**ask, tool_choice=named)).choices[0].message.tool_calls or []
    assert forced.type == "function" and forced.function.name == "set_timer"
    assert isinstance(json.loads(forced.function.arguments)["minutes"], int)
    assert (await sdk.chat.completions.create(**ask, tool_choice="required")).choices[0].message.tool_calls
    none = (await sdk.chat.completions.create(**ask, tool_choice="none")).choices[0]
    assert none.message.content and not none.message.tool_calls


async def test_hot_answers_still_keep_to_the_schemas(sdk: openai.AsyncOpenAI) -> None:
    hot = {**ASK, "temperature": 2, "tool_choice": "required", "n": 8, "max_tokens": 400, "seed": 3}
    answer = await sdk.chat.completions.create(**{**hot, "parallel_tool_calls": False, "tools": [TIMER]})
    for choice in answer.choices:
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        if choice.finish_reason == "tool_calls":
            arguments = json.loads(call.function.arguments)
            assert arguments.keys() == {"minutes"} and isinstance(arguments["minutes"], int)
    assert any(choice.finish_reason == "tool_calls" for choice in answer.choices)


async def test_native_answers_and_streams_have_the_call(demo_fleet: Fleet) -> None:
    inputs = {"messages": OSLO, "tools": [WEATHER["function"], TIMER["function"]], "temperature": 0}
    expected = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    async with client(demo_fleet.base_url) as http:
        whole = await run(http, inputs)
        told = await stream(http, inputs)
    assert whole["tool_calls"] == [expected] and whole["response"] == "" and whole["finish_reason"] == "tool_calls"
    assert [event["tool_calls"] for event in told if "tool_calls" in event] == [[{"index": 0, **expected}]]
    assert told[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    async with AsyncAI(demo_fleet.base_url) as ai:
        tokens: Any = await ai.run(MODEL, {**inputs, "stream": True})
        assert [token async for token in tokens] == []
        assert tokens.tool_calls == [expected] and tokens.finish_reason == "tool_calls"


@pytest.mark.parametrize("form", ["whole", "streamed"])
async def test_langchain_binds_tools(demo_fleet: Fleet, form: str) -> None:
    library = pytest.importorskip("langchain_cloudflare", reason="langchain-cloudflare is not installed (extra `dev`)")
    where = {"account_id": "acc", "api_token": "unused", "base_url": f"{demo_fleet.base_url}/client/v4"}
    chat = library.ChatCloudflareWorkersAI(**where, model=MODEL, max_tokens=80, temperature=0.0, max_retries=0)
    bound = chat.bind_tools([WEATHER, TIMER])
    if form == "whole":
        answer = await bound.ainvoke(OSLO)
    else:  # not astream: that reads no calls from native streams
        chunks = await asyncio.to_thread(lambda: list(bound.stream(OSLO)))
        answer = sum(chunks[1:], chunks[0])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"], answer.content) == ("get_weather", {"city": "Oslo"}, "")
    result = {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": RESULT}
    assert (await bound.ainvoke([*OSLO, answer, result])).content == "It is 12 degrees and sunny in Oslo."


# A worker dies


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path_factory.mktemp("tools")) as fleet:
        fleet.start("kv", "kv-0")
        fleet.start("prefill", "prefill-0", *SMALL)
        fleet.start("decode", "decode-0", *SMALL)
        fleet.start("decode", "decode-1", *SMALL)
        await fleet.ready()
        yield fleet


async def test_a_call_goes_on_with_its_id_when_its_decode_worker_is_killed(fleet: Fleet) -> None:
    words = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 12, "maxItems": 14}
    parameters = {"type": "object", "properties": {"words": words}, "required": ["words"]}
    tools = ToolUse((Tool("say", "Say some words", parameters),), frozenset({"say"}), must_call=True)
    options = GenerationOptions(max_tokens=400, temperature=1.5, seed=4, cache=CachePolicy.of("off", None))
    service = TextService(fleet.gateway.catalog, fleet.gateway.dispatcher)
    request = ChatRequest(MODEL, tuple(OSLO), Caller("the-same"), options, tools)

    async def call(kill_after: int | None) -> tuple[str, str, str, str | None]:
        call_id, name, pieces, reason = "", "", list[str](), None
        answer = await service.start(request)
        async for delta in answer:
            for part in delta.calls:
                call_id, name = part.call_id, part.name or name
                pieces += [part.arguments] if part.arguments else []
            reason = delta.finish_reason
            if kill_after is not None and len(pieces) >= kill_after:
                kill_after = None
                fleet.services[answer.route["decode"]].kill(signal.SIGKILL)
        assert kill_after is None
        return call_id, name, "".join(pieces), reason

    expected = await call(None)
    assert expected[3] == "tool_calls"
    jsonschema_rs.validate(parameters, json.loads(expected[2]))
    assert await call(20) == expected
