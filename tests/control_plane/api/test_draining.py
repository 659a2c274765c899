"""A gateway that drains refuses what comes, for clients to repeat it elsewhere, and ends what is left with an error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from control_plane.drain import Drain, time_is_over
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.http.raw_client import until
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello world, how are you"), 1]
HEADERS = {"cf-consn-model-id": "demo"}
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", {"model": "demo", "prompt": "a"}),
    "native": ("/client/v4/accounts/me/ai/run/demo", {"prompt": "hi"}),
    "OpenAI's at Cloudflare's address": ("/client/v4/accounts/me/ai/v1/chat/completions", CHAT),
    "binding": ("/run", {"inputs": {"prompt": "hi"}}),
}
REMEDY = "send the request again"


def streaming(endpoint: str) -> tuple[str, dict[str, Any]]:
    path, body = CALLS[endpoint]
    return path, {"inputs": {**body["inputs"], "stream": True}} if endpoint == "binding" else {**body, "stream": True}


@pytest.mark.parametrize("endpoint", CALLS)
async def test_a_stream_that_runs_when_the_time_is_over_ends_with_what_to_do(endpoint: str) -> None:
    script = Script(HELLO, fail_after=2, failure=time_is_over())
    received = ""
    async with serve(ScriptedDispatcher(script)) as gateway:
        path, body = streaming(endpoint)
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            async with gateway.client.stream("POST", path, json=body, headers=HEADERS) as response:
                assert response.status_code == 200
                async for text in response.aiter_text():
                    received += text
    assert "[DONE]" not in received
    last = [line for line in received.splitlines() if line.startswith("data: ")][-1]
    event = json.loads(last.removeprefix("data: "))
    assert REMEDY in json.dumps(event["error"]), event
    if "Cloudflare" in endpoint or endpoint == "native":
        assert REMEDY in event["errors"][0]["message"] and event["errors"][0]["code"] == 3040


@pytest.mark.parametrize("endpoint", CALLS)
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_an_answer_that_was_not_begun_is_a_503_that_may_be_repeated_if_nothing_was_billed(
    endpoint: str, num_tokens: int
) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO, fail_after=num_tokens, failure=time_is_over()))) as gateway:
        path, body = CALLS[endpoint]
        response = await gateway.client.post(path, json=body, headers=HEADERS)
    assert response.status_code == 503 and REMEDY in response.text
    repeats = ("retry-after" in response.headers, response.headers.get("x-should-retry"))
    assert repeats == ((False, "false") if num_tokens else (True, None))


@pytest.mark.parametrize("endpoint", CALLS)
async def test_a_new_request_on_an_open_connection_is_refused_and_the_connection_closed(endpoint: str) -> None:
    drain = Drain()
    async with serve(ScriptedDispatcher(Script(HELLO)), drain=drain) as gateway:
        path, body = CALLS[endpoint]
        assert (await gateway.client.post(path, json=body, headers=HEADERS)).status_code == 200
        assert (await gateway.client.get("/readyz")).status_code == 200
        drain.begin()
        response = await gateway.client.post(path, json=body, headers=HEADERS)
        assert (response.status_code, response.headers["connection"]) == (503, "close")
        assert response.headers["retry-after"] == "1" and "x-should-retry" not in response.headers
        assert REMEDY in response.text
        assert len(gateway.dispatcher.requests) == 1


@pytest.mark.parametrize("path", ["/readyz", "/health", "/ping"])
async def test_a_gateway_that_drains_is_not_ready_at_once_but_alive(path: str) -> None:
    drain = Drain()
    async with serve(drain=drain) as gateway:
        assert (await gateway.client.get(path)).status_code == 200
        drain.begin()
        response = await gateway.client.get(path)
        assert (response.status_code, response.json()["ready"]) == (503, False)
        assert "retry-after" not in response.headers and response.headers["connection"] == "close"
        assert (await gateway.client.get("/healthz")).status_code == 200


@pytest.mark.parametrize("endpoint", CALLS)
async def test_what_runs_when_the_drain_begins_is_answered(endpoint: str) -> None:
    drain, script = Drain(), Script(HELLO, pause_after=1)
    async with serve(ScriptedDispatcher(script), drain=drain) as gateway:
        path, body = CALLS[endpoint]
        asking = asyncio.create_task(gateway.client.post(path, json=body, headers=HEADERS))
        await gateway.dispatcher.waits_for_resume.wait()
        drain.begin()
        script.resume.set()
        assert (await asking).status_code == 200


async def test_a_request_without_an_answer_at_the_very_end_gets_one() -> None:
    """Whatever it waits for: here a worker that neither accepts nor refuses, and a body that does not come."""
    drain, script = Drain(), Script(HELLO, accept=asyncio.Event())
    async with serve(ScriptedDispatcher(script), drain=drain) as gateway:
        asking = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=CHAT))
        await gateway.dispatcher.submitted.wait()
        reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        await until(lambda: gateway.connections.counts["bodies"] == 1)
        drain.begin()
        drain.end()
        response = await asking
        assert response.status_code == 503 and REMEDY in response.text and response.headers["retry-after"] == "1"
        assert gateway.dispatcher.submit_cancelled.is_set()
        late = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert late.startswith(b"HTTP/1.1 503") and REMEDY.encode() in late and b"connection: close" in late


async def test_a_stream_that_has_begun_is_left_to_its_own_error() -> None:
    drain, script = Drain(), Script(HELLO, pause_after=1)
    async with (
        serve(ScriptedDispatcher(script), drain=drain) as gateway,
        gateway.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        drain.begin()
        drain.end()
        script.resume.set()
        assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
