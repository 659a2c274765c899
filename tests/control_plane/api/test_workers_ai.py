"""Cloudflare's SDK, and the wire formats of REST and the binding, work."""

from __future__ import annotations

import json
import re
from typing import Any

import cloudflare
import pytest

from control_plane.text.request import session_key
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import byte_level_tokenizer, ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

EOS = 1
HELLO = [*ids_of("Hello world, 你好 😀"), EOS]
RUN = "/client/v4/accounts/me/ai/run/@tandem/demo"
BINDING = {"cf-consn-model-id": "@tandem/demo", "cf-consn-sdk-version": "2.0.0"}


def sdk(gateway: Gateway) -> cloudflare.AsyncCloudflare:
    return cloudflare.AsyncCloudflare(base_url=gateway.url + "/client/v4", api_token="x", max_retries=0)


def native_events(body: str) -> list[dict[str, Any]]:
    """Check the native stream's form and return its events."""
    lines = body.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def check_native_stream(body: str) -> None:
    *texts, last = native_events(body)
    assert "".join(event["response"] for event in texts) == "Hello world, 你好 😀"
    assert all(set(event) == {"response", "p"} and re.fullmatch("[a-z0-9]+", event["p"]) for event in texts)
    assert last["response"] == "" and last["usage"]["completion_tokens"] == len(HELLO)


async def test_the_sdk_runs_a_model_whose_name_it_percent_encodes() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO, num_cached_tokens=3))) as gateway, sdk(gateway) as client:
        result: Any = await client.ai.run("@tandem/demo", account_id="me", prompt="hi", max_tokens=64)
    assert result["response"] == "Hello world, 你好 😀"
    assert result["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    (request,) = gateway.dispatcher.requests
    assert request.account == "me" and request.sampling.max_tokens == 64


async def test_the_sdk_streams_through_its_raw_response() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway, sdk(gateway) as client:
        running = client.ai.with_streaming_response.run(
            "@tandem/demo", account_id="me", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        async with running as response:
            lines = [line async for line in response.iter_lines()]
    check_native_stream("\n".join(lines) + "\n")


async def test_the_sdk_pages_through_the_models_to_an_end() -> None:
    async with serve() as gateway, sdk(gateway) as client:
        models: list[Any] = [model async for model in client.ai.models.list(account_id="me")]
    assert [model["name"] for model in models] == ["@tandem/demo"]


async def test_the_sdk_raises_for_an_unknown_model() -> None:
    async with serve() as gateway, sdk(gateway) as client:
        with pytest.raises(cloudflare.BadRequestError) as raised:
            await client.ai.run("@cf/meta/other", account_id="me", prompt="hi")
    assert [error.code for error in raised.value.errors] == [5007]


async def test_a_body_is_json_whatever_its_content_type_says() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        headers = {"content-type": "application/x-www-form-urlencoded"}
        response = await gateway.client.post(RUN, content=b'{"prompt": "hi"}', headers=headers)
        named = await gateway.client.post(
            "/client/v4/accounts/me/ai/run", json={"model": "demo", "input": {"prompt": "hi"}}
        )
    assert response.json()["success"] and response.json()["errors"] == [] == response.json()["messages"]
    assert named.json()["result"]["response"] == "Hello world, 你好 😀"


async def test_a_whole_number_may_be_written_with_a_point() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        whole = await gateway.client.post(RUN, content=b'{"prompt": "hi", "max_tokens": 7.0, "seed": 1e3}')
        half = await gateway.client.post(RUN, content=b'{"prompt": "hi", "max_tokens": 7.5}')
    assert whole.status_code == 200 and half.status_code == 400 and "valid integer, got 7.5" in half.text
    (request,) = gateway.dispatcher.requests
    assert (request.sampling.max_tokens, request.sampling.seed) == (7, 1000)


async def test_a_native_stream_has_filler_usage_and_done() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        response = await gateway.client.post(RUN, json={"prompt": "hi", "stream": True})
    assert response.headers["content-type"] == "text/event-stream"
    check_native_stream(response.text)


async def test_a_prompt_is_a_users_message_unless_it_is_raw() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        for body in (
            {"prompt": "hi"},
            {"messages": [{"role": "user", "content": "hi"}]},
            {"prompt": "hi", "raw": True},
        ):
            await gateway.client.post(RUN, json=body)
    prompt, messages, raw = (request.token_ids for request in gateway.dispatcher.requests)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(prompt) == byte_level_tokenizer().encode(text, add_special_tokens=False).ids == list(messages)
    assert list(raw) == [0, *ids_of("hi")]


async def test_a_raw_prompt_may_hold_control_tokens() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        await gateway.client.post(RUN, json={"prompt": "<|im_start|>user", "raw": True})
        await gateway.client.post(RUN, json={"prompt": "<|im_start|>user"})
    raw, escaped = (request.token_ids for request in gateway.dispatcher.requests)
    assert raw.count(2) == 1 and escaped.count(2) == 2  # the template's own two


async def test_defaults_and_run_options_are_cloudflares() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        body = {"prompt": "hi", "top_p": 1.5, "stop": None, "options": {"rejectIfBusy": True}}
        await gateway.client.post(RUN, json=body, headers={"x-session-affinity": "ses_1"})
    (request,) = gateway.dispatcher.requests
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.top_p) == (256, 0.6, 1.0)
    assert request.reject_if_busy and request.session_affinity == session_key(request.account, "@tandem/demo", "ses_1")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "exactly one of prompt and messages"),
        ({"prompt": "a", "messages": []}, "exactly one of prompt and messages"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": 5}, "prompt should be a valid string, got 5"),
        ({"prompt": "a", "temperature": 6}, "less than or equal to 5"),
        ({"prompt": "a", "top_k": 51}, "less than or equal to 50"),
        ({"prompt": "a", "seed": 0}, "greater than or equal to 1"),
        ({"prompt": "a", "n": 2}, "n above 1"),
        ({"prompt": "a", "logprobs": True}, "logprobs is not supported here: @tandem/demo has the native wire format"),
        ({"prompt": "a", "suffix": "x"}, "suffix is not supported"),
        ({"prompt": "a", "foo": False}, "foo is not a field of this request"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "'xml' is not supported"),
        ({"prompt": "a", "stream_options": {"include_use": True}}, "did you mean include_usage?"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "c"}]}, "only tool messages can have one"),
        ({"messages": [{"role": "user", "content": "a"}], "raw": True}, "raw can be used with prompt"),
        ({"messages": [{"role": "user", "content": "a"}], "functions": [{"name": "f"}]}, "supported here; send tools"),
        ({"requests": [{"prompt": "a"}]}, "requests is not supported"),
    ],
)
@pytest.mark.parametrize("endpoint", ["rest", "binding"])
async def test_bad_inputs_are_named_in_the_endpoints_own_format(
    endpoint: str, body: dict[str, Any], words: str
) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        if endpoint == "rest":
            response = await gateway.client.post(RUN, json=body)
            (error,) = response.json()["errors"]
            assert response.json()["success"] is False and response.json()["result"] == {}
            assert re.fullmatch(r"AiError: AiError: .* \([0-9a-f-]{36}\)", error["message"])
            code, message = error["code"], error["message"]
        else:
            response = await gateway.client.post("/run", json={"inputs": body, "options": {}}, headers=BINDING)
            assert set(response.json()) == {"internalCode", "name", "message", "description"}
            code, message = response.json()["internalCode"], response.json()["description"]
    assert response.status_code == 400 and code == 5006 and words in message
    assert gateway.dispatcher.requests == []


@pytest.mark.parametrize("path", ["/run?version=3", "/run", "/ai-gateway/run?version=2"])
async def test_the_binding_gets_the_bare_result_as_exactly_application_json(path: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        call = {"inputs": {"prompt": "hi"}, "options": {"tags": ["a:b"], "rejectIfBusy": True, "gateway": {"id": "g"}}}
        response = await gateway.client.post(path, json=call, headers=BINDING)
    assert response.headers["content-type"] == "application/json"
    assert response.json()["response"] == "Hello world, 你好 😀" and "success" not in response.json()
    assert (
        response.headers["cf-ai-req-id"]
        == response.headers["x-request-id"]
        == gateway.dispatcher.last.request.request_id
    )
    assert gateway.dispatcher.requests[0].reject_if_busy


async def test_the_binding_streams_natively_and_needs_no_options() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        response = await gateway.client.post("/run", json={"inputs": {"prompt": "hi", "stream": True}}, headers=BINDING)
    assert response.headers["content-type"] == "text/event-stream"
    check_native_stream(response.text)


async def test_the_binding_needs_its_model_header_and_refuses_queues_by_name() -> None:
    async with serve() as gateway:
        unnamed = await gateway.client.post("/run", json={"inputs": {"prompt": "hi"}})
        assert (unnamed.status_code, unnamed.json()["internalCode"]) == (400, 3003)
        call = {"inputs": {"prompt": "hi"}, "options": {"queueRequest": True}}
        queued = await gateway.client.post("/run", json=call, headers=BINDING)
    assert "cf-consn-model-id is missing" in unnamed.json()["description"]
    assert "queueRequest is not supported" in queued.json()["description"]


async def test_a_search_filters_and_its_pages_end() -> None:
    async with serve() as gateway:
        for prefix in ("/client/v4/accounts/me/ai", "/ai-api"):
            url = f"{prefix}/models/search"
            first = (await gateway.client.get(url, params={"search": "DEMO", "per_page": 1})).json()
            assert [model["name"] for model in first["result"]] == ["@tandem/demo"]
            assert first["result"][0]["task"]["name"] == "Text Generation"
            for empty in ({"page": 2}, {"search": "llama"}, {"task": "Text Embeddings"}):
                assert (await gateway.client.get(url, params=empty)).json()["result"] == []
            bad = await gateway.client.get(url, params={"page": "x"})
            assert bad.status_code == 400 and "page is 'x'" in bad.json()["errors"][0]["message"]
