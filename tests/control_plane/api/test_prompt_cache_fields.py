"""Every endpoint accepts the fields of the prompt cache, and refuses invalid values by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from control_plane.accounts.identity import Caller
from control_plane.generation import EVERYTHING, CachePolicy, TokenRequest
from control_plane.text.public_prefixes import PublicPrefixes
from control_plane.text.request import ChatRequest
from control_plane.text.text_service import TextService
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import OneModel, description, ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello"), 1]
HI = [{"role": "user", "content": "hi"}]
ASKED = {"cache_salt": "größe", "prompt_cache": "read", "prompt_cache_tokens": 512}
ENDPOINTS = ["chat", "completions", "rest", "rest /v1", "binding"]


async def post(gateway: Gateway, endpoint: str, fields: dict[str, Any]) -> tuple[int, str]:
    """Send a small request to an endpoint; return the status and the words of its answer."""
    account = "/client/v4/accounts/me/ai"
    binding = {"cf-consn-model-id": "demo"}
    calls: dict[str, dict[str, Any]] = {
        "chat": {"url": "/v1/chat/completions", "json": {"model": "demo", "messages": HI, **fields}},
        "completions": {"url": "/v1/completions", "json": {"model": "demo", "prompt": "hi", **fields}},
        "rest": {"url": f"{account}/run/demo", "json": {"prompt": "hi", **fields}},
        "rest /v1": {"url": f"{account}/v1/chat/completions", "json": {"model": "demo", "messages": HI, **fields}},
        "binding": {"url": "/run", "json": {"inputs": {"prompt": "hi", **fields}}, "headers": binding},
    }
    response = await gateway.client.post(**calls[endpoint])
    return response.status_code, response.text


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_every_endpoint_takes_the_three_fields(endpoint: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        for fields in (ASKED, {}, dict.fromkeys(ASKED)):
            assert (await post(gateway, endpoint, fields))[0] == 200
    sent, absent, null = gateway.dispatcher.requests
    assert (sent.salt, sent.cache) == ("größe".encode(), CachePolicy.of("read", 512))
    for request in (absent, null):
        assert (request.salt, request.cache) == (b"", EVERYTHING)
    assert sent.account == ("me" if endpoint.startswith("rest") else "default")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_cache": "never"}, "prompt_cache must be one of on, read, write, off; leave it out for on, got"),
        ({"prompt_cache": True}, "prompt_cache must be one of on, read, write, off"),
        ({"prompt_cache": {"mode": "off"}}, "prompt_cache must be one of on, read, write, off"),
        ({"prompt_cache_tokens": -1}, "prompt_cache_tokens should be greater than or equal to 0, got -1"),
        ({"prompt_cache_tokens": "9"}, "prompt_cache_tokens should be a valid integer"),
        ({"cache_salt": ""}, "cache_salt must be text of 1 to 256 characters; leave it out to send none"),
        ({"cache_salt": 5}, "cache_salt must be text of 1 to 256 characters"),
        ({"cache_salt": "x" * 257}, "cache_salt must be text of 1 to 256 characters"),
        ({"prompt_cach": "off"}, "did you mean prompt_cache?"),
    ],
)
async def test_what_none_of_them_can_be_is_refused_by_name(endpoint: str, fields: dict[str, Any], words: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        status, text = await post(gateway, endpoint, fields)
    assert status == 400 and words in text
    assert gateway.dispatcher.requests == []


async def test_openais_own_fields_change_nothing() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        await post(gateway, "chat", {"prompt_cache_key": "session-1", "prompt_cache_retention": "24h"})
    (request,) = gateway.dispatcher.requests
    assert (request.salt, request.cache) == (b"", EVERYTHING)


async def test_the_dispatcher_is_told_how_much_of_a_prompt_is_public(tmp_path: Path) -> None:
    (tmp_path / "support.txt").write_text("You are a small model.\n")
    dispatcher = ScriptedDispatcher(Script(HELLO))
    text = TextService(OneModel(description()), dispatcher, public_prefixes=PublicPrefixes.read(tmp_path))

    async def submitted(system: str) -> TokenRequest:
        messages = ({"role": "system", "content": system}, *HI)
        stream = await text.start(ChatRequest("demo", messages, Caller("r")))
        await stream.aclose()
        return dispatcher.requests[-1]

    public = ids_of("<|im_start|>system\nYou are a small model.<|im_end|>\n<|im_start|>user\n")
    assert (await submitted("You are a small model.")).num_public_tokens == len(public)
    template = ids_of("<|im_start|>system\n")  # is the same for every system message
    assert (await submitted("Hello you")).num_public_tokens == len(template)
