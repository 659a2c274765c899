"""Every answer has the request's id and durations, and the explanation if the request wants it; SDKs read on."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from cloudflare import AsyncCloudflare

from control_plane.api.http.connections import ConnectionLimits
from control_plane.api.http.request_context import HttpSettings
from tandem_runtime.errors import Overloaded, Unavailable
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello world"), 1]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
RUN = "/client/v4/accounts/me/ai/run/@tandem/demo"
WANTED = {"x-tandem-explain": "1"}
TIMING = re.compile(r"(?:[a-z_]+;dur=\d+\.\d{3}, )*total;dur=\d+\.\d{3}")
ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def hello() -> ScriptedDispatcher:
    return ScriptedDispatcher(Script(HELLO))


def check_headers(headers: Any) -> None:
    assert ID.fullmatch(headers["x-request-id"]) and headers["cf-ai-req-id"] == headers["x-request-id"]
    assert TIMING.fullmatch(headers["server-timing"]), headers["server-timing"]


async def test_every_answer_has_an_id_and_durations() -> None:
    async with serve(hello()) as gateway:
        for path in ("/", "/healthz", "/readyz", "/v1/workers", "/v1/models", "/v1/requests", "/metrics", "/nowhere"):
            check_headers((await gateway.client.get(path)).headers)
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/chat/completions", {**CHAT, "model": "none"}),
            ("/v1/chat/completions", {**CHAT, "surprise": 1}),
            (RUN, {"prompt": "hi"}),
            (RUN, {"prompt": "hi", "stream": True}),
            ("/v1/requests", {}),
        ):
            check_headers((await gateway.client.post(path, json=body)).headers)
    for refusal in (Overloaded("full", retry_after_seconds=1.0), Unavailable("away", retry_after_seconds=1.0)):
        async with serve(ScriptedDispatcher(Script(refuse=refusal))) as gateway:
            answer = await gateway.client.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code in (429, 503)
            check_headers(answer.headers)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"NO HTTP\r\n\r\n", 400),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2000\r\n\r\n", 503),
        (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 900\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
async def test_answers_of_the_server_itself_have_an_id_and_durations(sent: bytes, status: int) -> None:
    limits = ConnectionLimits(max_bodies_bytes=1_000, max_head_bytes=65_536)
    async with serve(hello(), limits=limits, settings=HttpSettings(max_body_bytes=100)) as gateway:
        answered, headers = await raw(gateway, sent)
    assert answered == status
    check_headers(headers)


async def raw(gateway: Gateway, sent: bytes) -> tuple[int, dict[str, str]]:
    """Send bytes; return the status and headers of the answer."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode()
    writer.close()
    first, *lines = head.strip().split("\r\n")
    return int(first.split(" ")[1]), dict(line.lower().split(": ", 1) for line in lines)


async def test_a_whole_answer_has_the_explanation_only_if_it_is_wanted() -> None:
    async with serve(hello()) as gateway:
        for path, body in (("/v1/chat/completions", CHAT), (RUN, {"prompt": "hi"})):
            plain = (await gateway.client.post(path, json=body)).json()
            assert "tandem" not in plain
            answer = await gateway.client.post(path, json=body, headers=WANTED)
            value = answer.json()
            found = value.pop("tandem")["explanation"]
            assert value.keys() == plain.keys() and found["object"] == "tandem.explanation"
            assert found["id"] == answer.headers["x-request-id"] and found["state"] == "finished"
            assert found["usage"]["completion_tokens"] == len(HELLO) and found["texts"] is None
        binding = {"cf-consn-model-id": "@tandem/demo", **WANTED}
        value = (
            await gateway.client.post("/run", json={"inputs": {"prompt": "hi"}, "options": {}}, headers=binding)
        ).json()
        assert value["response"] == "Hello world" and value["tandem"]["explanation"]["account"] == "default"
        for word in ("0", "yes", ""):
            other = await gateway.client.post("/v1/chat/completions", json=CHAT, headers={"x-tandem-explain": word})
            assert "tandem" not in other.json()


@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
async def test_a_streams_last_event_has_the_durations_and_before_done_comes_the_explanation(
    options: dict[str, Any],
) -> None:
    body = {**CHAT, "stream": True, **({"stream_options": options} if options else {})}
    async with serve(hello()) as gateway:
        plain = await events(gateway, "/v1/chat/completions", body)
        explained = await events(gateway, "/v1/chat/completions", body, WANTED)
    assert [event.keys() >= {"server_timing"} for event in plain] == [False] * (len(plain) - 1) + [True]
    assert TIMING.fullmatch(plain[-1]["server_timing"])
    assert ("usage" in plain[-1] and plain[-1]["choices"] == []) == bool(options)
    if not options:
        assert plain[-1]["choices"][0]["finish_reason"] == "stop", "no event is added that clients would not expect"
    *before, last = explained
    assert len(before) == len(plain) and last["choices"] == []
    assert last["tandem"]["explanation"]["state"] == "finished"


@pytest.mark.parametrize("wire_format", ["native", "openai"])
async def test_a_stream_of_workers_ai_has_the_same_at_its_end(wire_format: str) -> None:
    body = {"prompt": "hi", "stream": True}
    async with serve(hello(), wire_format=wire_format) as gateway:
        plain = await events(gateway, RUN, body)
        explained = await events(gateway, RUN, body, WANTED)
    assert "server_timing" in plain[-1] and plain[-1]["usage"]["completion_tokens"] == len(HELLO)
    assert explained[-1]["response"] == "" and explained[-1]["tandem"]["explanation"]["account"] == "me"
    assert len(explained) == len(plain) + 1


async def events(
    gateway: Gateway, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    answer = await gateway.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]


async def test_an_answer_of_several_prompts_names_the_other_explanations() -> None:
    body = {"model": "demo", "prompt": ["one", "two", "three"]}
    async with serve(hello()) as gateway:
        answer = await gateway.client.post("/v1/completions", json=body, headers=WANTED)
        request_id, found = answer.headers["x-request-id"], answer.json()["tandem"]
        assert found["explanation"]["id"] == request_id
        assert found["other_ids"] == [f"{request_id}-1", f"{request_id}-2"]
        for other in found["other_ids"]:
            other_found = await gateway.client.get(f"/v1/requests/{other}/explain")
            assert other_found.status_code == 200 and other_found.json()["id"] == other


async def test_openais_sdk_reads_answers_and_streams_with_an_explanation() -> None:
    async with (
        serve(hello()) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused") as client,
    ):
        whole: Any = await client.chat.completions.create(**CHAT, extra_headers=WANTED)  # type: ignore[call-overload]
        assert whole.choices[0].message.content == "Hello world"
        assert whole.tandem["explanation"]["operation"] == "chat"
        stream: Any = await client.chat.completions.create(**CHAT, stream=True, extra_headers=WANTED)  # type: ignore[call-overload]
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "Hello world" and chunks[-1].tandem["explanation"]["state"] == "finished"
        plain = await client.completions.create(model="demo", prompt="hi", extra_headers=WANTED)
        assert plain.choices[0].text == "Hello world"


async def test_cloudflares_sdk_reads_answers_with_an_explanation() -> None:
    async with (
        serve(hello()) as gateway,
        AsyncCloudflare(base_url=f"{gateway.url}/client/v4", api_token="unused") as client,
    ):
        found: Any = await client.ai.run("@tandem/demo", account_id="me", prompt="hi", extra_headers=WANTED)
    assert found["response"] == "Hello world"
