"""/ai/run and the binding answer as OpenAI does if the model's wire format is openai."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello world, 你好 😀"), 1]
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}


async def run(gateway: Gateway, endpoint: str, inputs: dict[str, Any]) -> tuple[int, str]:
    if endpoint == "binding":
        body, headers = {"inputs": inputs}, {"cf-consn-model-id": "demo"}
        response = await gateway.client.post("/run", json=body, headers=headers)
    else:
        response = await gateway.client.post("/client/v4/accounts/me/ai/run/demo", json=inputs)
    return response.status_code, response.text


async def result(gateway: Gateway, endpoint: str, inputs: dict[str, Any]) -> Any:
    status, text = await run(gateway, endpoint, inputs)
    assert status == 200, text
    return json.loads(text) if endpoint == "binding" else json.loads(text)["result"]


@pytest.mark.parametrize("endpoint", ["rest", "binding"])
async def test_a_whole_answer_is_openais_object(endpoint: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO)), wire_format="openai") as gateway:
        chat = await result(gateway, endpoint, {**MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 1})
        plain = await result(gateway, endpoint, {"prompt": "hi"})
    assert chat["object"] == "chat.completion" and chat["model"] == "@tandem/demo"
    assert [choice["message"]["content"] for choice in chat["choices"]] == ["Hello world, 你好 😀"] * 2
    assert len(chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 1
    assert chat["usage"]["completion_tokens"] == 2 * len(HELLO)
    assert plain["object"] == "text_completion" and plain["choices"][0]["text"] == "Hello world, 你好 😀"


@pytest.mark.parametrize("endpoint", ["rest", "binding"])
@pytest.mark.parametrize("inputs", [MESSAGES, {"prompt": "hi"}])
async def test_a_stream_is_chunks_whose_usage_adds_up_to_the_native_event_at_its_end(
    endpoint: str, inputs: dict[str, Any]
) -> None:
    dispatcher = ScriptedDispatcher(Script(HELLO, num_cached_tokens=2))
    async with serve(dispatcher, wire_format="openai") as gateway:
        status, text = await run(gateway, endpoint, {**inputs, "stream": True})
    assert status == 200 and text.endswith("data: [DONE]\n\n")
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
    assert set(last) == {"response", "usage", "server_timing"} and last["response"] == ""
    assert all(re.fullmatch("[a-z0-9]+", chunk["p"]) for chunk in chunks)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert sum(chunk["usage"][name] for chunk in chunks) == last["usage"][name]
    cached = sum(chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks)
    assert cached == last["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    parts = [choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices]
    assert "".join(parts) == "Hello world, 你好 😀"
    assert choices[-1]["finish_reason"] == "stop" and chunks[-1]["choices"] == []


async def test_openais_own_endpoint_never_has_the_native_event() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO)), wire_format="openai") as gateway:
        body = {"model": "demo", **MESSAGES, "stream": True}
        for prefix in ("/v1", "/client/v4/accounts/me/ai/v1"):
            text = (await gateway.client.post(f"{prefix}/chat/completions", json=body)).text
            assert '"response"' not in text and '"p"' not in text and text.endswith("data: [DONE]\n\n")
