"""Calls of wrangler's and miniflare's dev servers arrive as the binding's own calls."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.text.request import session_key
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello"), 1]
PROXY = "/client/v4/accounts/acc1/ai/run/proxy"
CALL: dict[str, Any] = {"inputs": {"prompt": "hi"}, "options": {}}
WRANGLER = {"x-forwarded": "https://workers-binding.ai/run?version=3", "cf-consn-model-id": "demo"}
MINIFLARE = {
    "mf-binding": "AI",
    "mf-url": "https://workers-binding.ai/run?version=3",
    "mf-header-cf-consn-model-id": "demo",
    "mf-header-content-type": "application/json",
    "mf-header-x-session-affinity": "ses",
}


@pytest.mark.parametrize("headers", [WRANGLER, MINIFLARE])
@pytest.mark.parametrize("path", [PROXY, f"{PROXY}/"])
async def test_a_proxied_run_is_the_bindings_run(headers: dict[str, str], path: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        whole = await gateway.client.post(path, json=CALL, headers=headers)
        call = {**CALL, "inputs": {"prompt": "hi", "stream": True}}
        streamed = await gateway.client.post(path, json=call, headers=headers)
    assert whole.headers["content-type"] == "application/json" and whole.json()["response"] == "Hello"
    assert whole.headers["cf-ai-req-id"]
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert {request.account for request in gateway.dispatcher.requests} == {"acc1"}
    affinity = session_key("acc1", "@tandem/demo", "ses") if headers is MINIFLARE else ""
    assert {request.session_affinity for request in gateway.dispatcher.requests} == {affinity}


async def test_a_proxied_error_is_the_bindings_error() -> None:
    async with serve() as gateway:
        unknown = await gateway.client.post(PROXY, json=CALL, headers={**WRANGLER, "cf-consn-model-id": "other"})
        nowhere = {**WRANGLER, "x-forwarded": "https://workers-binding.ai/ai-gateway/other"}
        no_route = await gateway.client.post(PROXY, json=CALL, headers=nowhere)
    assert (unknown.status_code, unknown.json()["internalCode"]) == (400, 5007)
    assert (no_route.status_code, no_route.json()["internalCode"]) == (404, 7003)


async def test_models_are_found_through_the_proxy() -> None:
    target = {"x-forwarded": "https://workers-binding.ai/ai-api/models/search?search=demo&per_page=3"}
    async with serve() as gateway:
        found = (await gateway.client.get(PROXY, headers=target)).json()
    assert [model["name"] for model in found["result"]] == ["@tandem/demo"]
    assert found["result_info"]["per_page"] == 3


async def test_miniflares_socket_is_told_that_it_is_not_needed() -> None:
    async with serve() as gateway:
        upgrade = {"connection": "upgrade", "upgrade": "websocket"}
        response = await gateway.client.get(f"{PROXY}?MF-Binding=AI", headers=upgrade)
    assert (response.status_code, response.content) == (426, b"")


@pytest.mark.parametrize(
    ("headers", "code", "words"),
    [
        ({}, 3003, "send X-Forwarded or MF-URL"),
        ({"x-forwarded": "https://workers-binding.ai/v1/models"}, 5006, "is not a call of the AI binding"),
        ({"mf-url": "http://[bad/run"}, 5006, "is not a URL"),
        ({"mf-url": "/"}, 5006, "is not a call of the AI binding"),
    ],
)
async def test_only_the_binding_is_reached_that_way(headers: dict[str, str], code: int, words: str) -> None:
    async with serve() as gateway:
        response = await gateway.client.post(PROXY, json=CALL, headers=headers)
    assert response.status_code == 400 and response.headers["cf-ai-req-id"]
    (error,) = response.json()["errors"]
    assert error["code"] == code and words in error["message"]
