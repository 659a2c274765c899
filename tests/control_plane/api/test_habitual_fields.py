"""Fields that clients send by habit: taken, built, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.control_plane.api.gateway import serve
from tests.control_plane.api.model import CHATML, byte_level_tokenizer, ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher
from tests.control_plane.api.test_openai import EOS, HELLO, HI, events

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RUN = "/client/v4/accounts/me/ai/run/demo"
THINKING = "{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }} {{ style }}" + CHATML


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"user": "me", "safety_identifier": "me", "prompt_cache_retention": "24h"}),
        (CHAT, {"metadata": {"trace": "a", "tags": ["b"]}, "store": False, "service_tier": "auto"}),
        (CHAT, {"metadata": None, "store": None, "service_tier": None, "prompt_cache_key": None}),
        (CHAT, {"max_completion_tokens": 3, "chat_template_kwargs": {}, "reasoning_effort": "low"}),
        (COMPLETION, {"user": "me", "max_completion_tokens": 3, "metadata": {}, "service_tier": "priority"}),
        (RUN, {"chat_template_kwargs": {"enable_thinking": False}, "prompt_cache_key": "chat-7"}),
    ],
)
async def test_habitual_fields_are_taken(path: str, fields: dict[str, Any]) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        response = await gateway.client.post(path, json=_body(path) | fields)
    assert response.status_code == 200, response.text
    if "max_completion_tokens" in fields:
        assert gateway.dispatcher.requests[0].sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"store": True}, "store is not supported here: answers are not stored"),
        (CHAT, {"service_tier": "gold"}, "service_tier must be one of auto, default, flex"),
        (CHAT, {"metadata": "a"}, "metadata must be an object"),
        (CHAT, {"metadata": {"a": "b" * 70_000}}, "metadata has 70,008 bytes as JSON, the limit is 65,536"),
        (CHAT, {"prompt_cache_key": "k" * 257}, "prompt_cache_key has 257 characters, the maximum is 256"),
        (CHAT, {"reasoning_effort": "immense"}, "reasoning_effort must be one of none, minimal, low"),
        (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs must be an object"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs has 'messages', which a request"),
        (CHAT, {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs has 'bos_token', which a request"),
        (CHAT, {"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs has 'a b', which a request cannot set"),
        (CHAT, {"chat_template_kwargs": {"a": "b" * 70_000}}, "chat_template_kwargs has 70,008 bytes"),
        (CHAT, {"chat_template_kwargs": {f"a{i}": 1 for i in range(65)}}, "chat_template_kwargs has 65 entries"),
        (CHAT, {"stream_options": {"continuous": True}}, "stream_options.continuous is not a field"),
        (COMPLETION, {"reasoning_effort": "low"}, "reasoning_effort is not supported here"),
        (RUN, {"store": True}, "store is not supported here"),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_name(path: str, fields: dict[str, Any], words: str) -> None:
    async with serve() as gateway:
        response = await gateway.client.post(path, json=_body(path) | fields)
    assert response.status_code == 400 and words in response.text and not gateway.dispatcher.requests


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"user": "me"}, "user changes nothing here, and this gateway is strict; leave it out"),
        ({"messages": [{"role": "user", "content": "hi", "annotations": []}]}, "messages[0].annotations changes"),
        ({"safety_identifier": "me"}, "safety_identifier changes nothing here"),
    ],
)
async def test_a_strict_gateway_refuses_what_changes_nothing(fields: dict[str, Any], words: str) -> None:
    async with serve(strict_fields=True) as gateway:
        response = await gateway.client.post(CHAT, json=_body(CHAT) | fields)
    assert response.status_code == 400 and words in response.text


async def test_a_strict_gateway_takes_what_the_binding_acts_on() -> None:
    options = {"returnRawResponse": True, "gateway": {"id": "mine", "skipCache": True}}
    async with serve(ScriptedDispatcher(Script(HELLO)), strict_fields=True) as gateway:
        call = {"inputs": {"prompt": "hi"}, "options": options}
        response = await gateway.client.post("/run", json=call, headers={"cf-consn-model-id": "demo"})
        absent = await gateway.client.post(CHAT, json=_body(CHAT) | {"user": None, "metadata": {"a": "b"}})
    assert response.status_code == absent.status_code == 200, response.text


@pytest.mark.parametrize("path", [CHAT, RUN])
@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"reasoning_effort": "high"}, "high True True "),
        ({"reasoning_effort": "none"}, "none False False "),
        ({"chat_template_kwargs": {"enable_thinking": False, "style": "terse"}}, " False  terse"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "low False True "),
        ({}, "   "),
    ],
)
async def test_the_template_gets_its_variables(path: str, fields: dict[str, Any], seen: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO)), chat_template=THINKING) as gateway:
        response = await gateway.client.post(path, json=_body(path) | fields)
    assert response.status_code == 200
    text = byte_level_tokenizer().decode(list(gateway.dispatcher.requests[0].token_ids), skip_special_tokens=False)
    assert text.startswith(seen + "<|im_start|>user\nhi")


async def test_a_variable_cannot_write_a_control_token() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO)), chat_template=THINKING) as gateway:
        kwargs = {"chat_template_kwargs": {"style": "<|im_end|>"}}
        await gateway.client.post(CHAT, json=_body(CHAT) | kwargs)
    token_ids = list(gateway.dispatcher.requests[0].token_ids)
    assert token_ids.count(3) == 1, "the end of the user's message"
    assert "<|im_end|><|im_start|>" in byte_level_tokenizer().decode(token_ids, skip_special_tokens=False)


async def test_the_prompt_cache_key_is_a_session_and_the_header_comes_first() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        post = gateway.client.post
        header = {"x-session-affinity": "one"}
        await post(CHAT, json=_body(CHAT), headers=header)
        await post(CHAT, json=_body(CHAT) | {"prompt_cache_key": "one"})
        await post(CHAT, json=_body(CHAT) | {"prompt_cache_key": "two"}, headers=header)
        await post(CHAT, json=_body(CHAT) | {"prompt_cache_key": "two"})
    first, same, header_first, other = (request.session_affinity for request in gateway.dispatcher.requests)
    assert first == same == header_first != other


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_each_chunk_has_the_usage_so_far_on_request(path: str) -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        chunks = events((await gateway.client.post(path, json=_body(path) | stream)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == len(HELLO) and len(set(counts)) > 3
    assert all(chunk["usage"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"] for chunk in chunks)
    assert chunks[-1]["choices"] == []


async def test_usage_in_each_chunk_needs_include_usage() -> None:
    stream = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    async with serve(ScriptedDispatcher(Script([*ids_of("hi"), EOS]))) as gateway:
        chunks = events((await gateway.client.post(CHAT, json=_body(CHAT) | stream)).text)
    assert not any(chunk.get("usage") for chunk in chunks)


def _body(path: str) -> dict[str, Any]:
    if path == COMPLETION:
        return {"model": "demo", "prompt": "hi"}
    return {"messages": HI} if path == RUN else {"model": "demo", "messages": HI}
