"""Streams send pings in silence, tolerate clients that do not read, and are cut after a failure."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest

from control_plane.api.http.request_context import HttpSettings
from control_plane.listening import listen
from tandem_runtime.errors import Unavailable
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

EOS = 1
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True}
NATIVE = "/client/v4/accounts/me/ai/run/demo"
LONG = ids_of("word ") * 40_000


async def _lines(gateway: Gateway, path: str, body: dict[str, Any]) -> list[str]:
    async with gateway.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-accel-buffering"] == "no"
        return [line async for line in response.aiter_lines() if line]


async def test_a_silent_stream_says_that_it_lives_and_a_busy_one_does_not() -> None:
    script = Script([*ids_of("Hello"), EOS], pause_after=2)
    settings = HttpSettings(ping_seconds=0.02)
    async with (
        serve(ScriptedDispatcher(script), settings=settings) as gateway,
        gateway.client.stream("POST", "/v1/chat/completions", json=CHAT) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith(": ping - "):
                script.resume.set()
        assert script.resume.is_set() and line == ""
    async with serve(ScriptedDispatcher(Script([*ids_of("Hello"), EOS]))) as gateway:
        assert not any(line.startswith(":") for line in await _lines(gateway, "/v1/chat/completions", CHAT))


async def test_text_that_came_before_a_failure_is_told_before_it_and_the_answer_has_no_end() -> None:
    script = Script(ids_of("Hello world"), fail_after=2, failure=Unavailable("the worker is gone"))
    lines: list[str] = []
    async with serve(ScriptedDispatcher(script)) as gateway:
        with pytest.raises(httpx.RemoteProtocolError):  # cut, without the last chunk
            async with gateway.client.stream("POST", NATIVE, json={"prompt": "x", "stream": True}) as response:
                async for line in response.aiter_lines():
                    lines += [line] if line else []
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert len(events) == 3 and all(event["response"] for event in events[:2])
    assert "the worker is gone" in events[2]["errors"][0]["message"]


async def test_a_client_that_does_not_read_holds_up_nobody_else() -> None:
    """Its own stream stands still, with most of the answer not even asked for."""
    dispatcher = ScriptedDispatcher()
    dispatcher.choose = lambda request: Script(LONG if request.sampling.max_tokens > 100 else [*ids_of("Hi"), EOS])
    bound = await listen("127.0.0.1:0", insecure=False, reuse_port=False, stalled_client_seconds=60.0)
    async with serve(dispatcher, context_length=1_000_000, listener=_with_small_buffers(bound)) as gateway:
        stuck = await _ask_and_not_read(gateway, max_tokens=len(LONG))
        stream = dispatcher.last
        while True:
            before = stream.num_generated
            lines = await _lines(gateway, NATIVE, {"prompt": "x", "stream": True, "max_tokens": 50})
            assert lines[-1] == "data: [DONE]"
            if stream.num_generated == before > 0:
                break
        assert 0 < stream.num_generated < len(LONG)
        stuck.close()
        await asyncio.wait_for(stream.closed.wait(), 20)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux ends connections that take nothing")
async def test_a_client_that_never_reads_is_left() -> None:
    dispatcher = ScriptedDispatcher(Script(LONG))
    bound = await listen("127.0.0.1:0", insecure=False, reuse_port=False, stalled_client_seconds=0.5)
    async with serve(dispatcher, context_length=1_000_000, listener=_with_small_buffers(bound)) as gateway:
        stuck = await _ask_and_not_read(gateway, max_tokens=len(LONG))
        await asyncio.wait_for(dispatcher.last.closed.wait(), 30)
        assert not dispatcher.last.ended
        stuck.close()


def _with_small_buffers(bound: socket.socket) -> socket.socket:
    """Let the connections of a listening socket buffer little: a stream to a client that does not read soon stops."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return bound


async def _ask_and_not_read(gateway: Gateway, max_tokens: int) -> socket.socket:
    """Return the client's side of a connection, once its answer has begun."""
    host, port = gateway.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "stream": True, "raw": True, "max_tokens": max_tokens})
    head = f"POST {NATIVE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    client.sendall((head + body).encode())
    client.setblocking(False)
    assert await asyncio.get_running_loop().sock_recv(client, 12) == b"HTTP/1.1 200"
    return client
