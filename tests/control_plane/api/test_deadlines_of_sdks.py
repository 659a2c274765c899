"""No SDK repeats, by itself, a request that has already had all the time it asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import cloudflare
import openai
import pytest

import tandem_client
from tests.clients.node import output_of
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello world, how are you"), 1]
MESSAGES: Any = [{"role": "user", "content": "hi"}]
_SECONDS = 0.5


async def _openai(gateway: Gateway, path: str) -> int | None:
    async with openai.AsyncOpenAI(base_url=gateway.url + path, api_key="x") as client:
        assert client.max_retries == 2
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="demo", messages=MESSAGES)
    return caught.value.status_code


async def _cloudflare(gateway: Gateway, path: str) -> int | None:
    async with cloudflare.AsyncCloudflare(base_url=gateway.url + path, api_token="x") as client:
        assert client.max_retries == 2
        with pytest.raises(cloudflare.APIStatusError) as caught:
            await client.ai.run("demo", account_id="acc", prompt="hi")
    assert caught.value.response.json()["errors"][0]["code"] == 3007
    return caught.value.status_code


async def _ours(gateway: Gateway, path: str) -> int | None:
    async with tandem_client.AsyncAI(gateway.url) as ai:
        with pytest.raises(tandem_client.DeadlineExceededError) as caught:
            await ai.run("demo", {"prompt": "hi"})
    assert not caught.value.may_repeat
    return caught.value.status


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize(
    ("call", "path", "status"),
    [
        (_openai, "/v1", 504),
        (_openai, "/client/v4/accounts/acc/ai/v1", 408),
        (_cloudflare, "/client/v4", 408),
        (_ours, "", 408),
    ],
)
async def test_python_sdks_send_a_request_that_took_too_long_once(
    call: Callable[[Gateway, str], Awaitable[int | None]], path: str, status: int, num_tokens: int
) -> None:
    script = Script(HELLO, pause_after=num_tokens)
    async with serve(ScriptedDispatcher(script), timeout_seconds=_SECONDS) as gateway:
        assert await call(gateway, path) == status
        assert len(gateway.dispatcher.requests) == 1


@pytest.mark.services
async def test_node_sdks_send_a_request_that_took_too_long_once() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO, pause_after=1)), timeout_seconds=_SECONDS) as gateway:
        errors = await asyncio.to_thread(output_of, "deadline.mjs", gateway.url, "demo")
        assert [error["status"] for error in errors] == [504, 504, 408, 408], errors
        assert len(gateway.dispatcher.requests) == len(errors)
