"""No connection costs more than its bounds: heads, bodies, times, pipelines, over raw sockets and a real server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import pytest

from control_plane.api.http.bounds import MAX_HEADERS, MAX_PIPELINED, MAX_URL_BYTES
from control_plane.api.http.connections import ConnectionLimits, Connections
from control_plane.api.http.request_context import HttpSettings
from control_plane.api.http.server import server_config
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.http.raw_client import GET, RawClient, chunked, connect, post, until
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello world, how are you"), 1]
CHAT = msgspec.json.encode({"model": "demo", "messages": [{"role": "user", "content": "hi"}]})
STREAM = msgspec.json.encode({"model": "demo", "stream": True, "messages": [{"role": "user", "content": "hi"}]})
PATIENT = ConnectionLimits(max_head_bytes=8_192, max_body_bytes=100_000, linger_seconds=0.5, sweep_seconds=0.05)
HASTY = replace(PATIENT, head_seconds=0.2, body_stall_seconds=0.2, body_seconds=1.0, grace_seconds=0.1)


def test_clients_close_idle_connections_before_the_gateway_does() -> None:
    """Else a client may send a request on a connection that is just being closed, and gets a reset for an answer."""
    kept_by_client = httpx.Limits().keepalive_expiry
    kept_by_gateway = server_config(_nothing, Connections(PATIENT)).timeout_keep_alive
    assert kept_by_client is not None and kept_by_gateway > 2 * kept_by_client


async def _nothing(*_: object) -> None: ...


@asynccontextmanager
async def served(limits: ConnectionLimits = PATIENT, script: Script | None = None) -> AsyncIterator[Gateway]:
    """Serve with `limits`; at the end no connection may be left, and no byte of a body."""
    settings = HttpSettings(max_body_bytes=limits.max_body_bytes)
    async with serve(ScriptedDispatcher(script or Script(HELLO)), limits=limits, settings=settings) as gateway:
        yield gateway
        await gateway.client.aclose()
        await until(lambda: not any(gateway.connections.counts.values()))
        assert gateway.connections.num_body_bytes == 0


# ------------------------------------------------------------------------------------------------------------- heads


async def test_half_a_head_is_answered_with_408_and_closed() -> None:
    async with served(HASTY) as gateway, connect(gateway) as client:
        await client.send(b"GET /healthz HTTP/1.1\r\nHost: local")
        answer = await client.answer()
        assert answer.status == 408 and "not complete after 0.2 s" in answer.message
        assert answer.headers["connection"] == "close" and answer.headers["x-request-id"]
        assert await client.rest() == b""


async def test_a_connection_that_sends_nothing_is_closed_without_an_answer() -> None:
    async with served(HASTY) as gateway, connect(gateway) as client:
        assert await client.rest() == b""


async def test_a_head_that_comes_byte_by_byte_has_the_same_time() -> None:
    async with served(HASTY) as gateway, connect(gateway) as client:
        await client.send(b"GET /healthz HTTP/1.1\r\nx-slow: ")
        assert await client.drip(b"a") == b"H"
        assert b"TTP/1.1 408" in await client.rest()


async def test_blank_lines_are_not_a_head() -> None:
    async with served(HASTY) as gateway, connect(gateway) as client:
        assert await client.drip(b"\r\n") in (b"H", b"")


async def test_the_second_head_of_a_connection_has_the_same_time() -> None:
    async with served(HASTY) as gateway, connect(gateway) as client:
        await client.send(GET + b"GET /healthz HTT")
        assert (await client.answer()).status == 200
        assert (await client.answer()).status == 408
        assert await client.rest() == b""


@pytest.mark.parametrize(
    ("head", "status", "words"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 33_000 + b"\r\n\r\n", 431, "32,768"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 10_000_000, 431, "32,768"),
        (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431, f"{MAX_HEADERS} headers"),
        (b"GET /" + b"a" * MAX_URL_BYTES + b" HTTP/1.1\r\n\r\n", 414, f"{MAX_URL_BYTES:,} bytes"),
        (b"GET /" + b"a" * 10_000_000, 414, "URL"),
        (b"GET /" + b"a" * 2_100 + b" HTTP/1.1\r\n\r\n", 414, "path has 2,101 characters, the limit is 2,048"),
        (b"GET /?" + b"a" * 8_193 + b" HTTP/1.1\r\n\r\n", 414, "query has 8,193 characters, the limit is 8,192"),
        (b"no HTTP at all\r\n\r\n", 400, "not valid HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "not valid HTTP"),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "not valid HTTP"),
        (b"CONNECT example.com:443 HTTP/1.1\r\n\r\n", 400, "not valid HTTP"),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400, "Host is 'a b'"),
    ],
    ids=[
        "header", "endless header", "headers", "URL", "endless URL", "path", "query", "text", "HTTP/2",
        "two lengths", "connect", "host",
    ],
)  # fmt: skip
async def test_a_head_beyond_its_bounds_is_refused_by_name(head: bytes, status: int, words: str) -> None:
    async with served(replace(PATIENT, max_head_bytes=32_768)) as gateway, connect(gateway) as client:
        sending = asyncio.ensure_future(client.send(head))
        answer = await client.answer()
        sending.cancel()
        assert answer.status == status and words in answer.message
        assert (await gateway.client.get("/healthz")).status_code == 200


async def test_a_refused_head_has_the_format_of_its_endpoint() -> None:
    async with served() as gateway:
        answers = {}
        for path in ("/client/v4/accounts/me/ai/run/demo", "/run"):
            async with connect(gateway) as client:
                await client.send(post(b"", path, headers="x: " + "a" * 9_000))
                answers[path] = await client.answer()
    assert [answer.status for answer in answers.values()] == [431, 431]
    assert answers["/client/v4/accounts/me/ai/run/demo"].json()["errors"][0]["code"] == 7003
    assert answers["/run"].json()["internalCode"] == 7003


async def test_an_address_may_not_keep_many_heads_unfinished() -> None:
    limits = replace(PATIENT, max_unfinished_heads=3, grace_seconds=0.1)
    async with served(limits) as gateway, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(gateway)) for _ in range(8)]
        for client in clients:
            await client.send(b"GET / HT")
        for client in clients[:5]:
            answer = await client.answer()
            assert answer.status == 429 and "more than 3 connections" in answer.message
            assert answer.headers["retry-after"]
        assert gateway.connections.counts["heads"] == 3
        for client in clients[5:]:
            await client.send(b"TP/1.1\r\n\r\n")
            assert (await client.answer()).status == 200


async def test_connections_beyond_the_bound_are_refused_and_a_place_becomes_free_again() -> None:
    async with served(replace(PATIENT, max_connections=2)) as gateway, AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(connect(gateway)) for _ in range(2)]
        for client in (first, second):
            await client.send(GET)
            assert (await client.answer()).status == 200
        async with connect(gateway) as third:
            answer = await third.answer()
            assert answer.status == 503 and "has 2 connections" in answer.message and answer.headers["retry-after"]
            assert await third.rest() == b""
        first.close()
        await until(lambda: gateway.connections.counts["open"] == 1)
        async with connect(gateway) as fourth:
            await fourth.send(GET)
            assert (await fourth.answer()).status == 200


# ------------------------------------------------------------------------------------------- requests that are allowed


async def test_what_http_allows_is_answered() -> None:
    async with served() as gateway:
        async with connect(gateway) as client:  # keep-alive, in pieces, after blank lines
            await client.send(b"\r\n" + GET)
            assert (await client.answer()).json() == {"status": "ok"}
            await client.send(GET[:10])
            await client.send(GET[10:])
            assert (await client.answer()).status == 200
        async with connect(gateway) as client:  # chunks, an extension, trailers
            body = chunked(CHAT[:7], CHAT[7:], end=b"0;why=end\r\nx-sum: 1\r\ncontent-type: none\r\n\r\n")
            await client.send(body + GET)
            assert (await client.answer()).json()["choices"][0]["finish_reason"] == "stop"
            assert (await client.answer()).status == 200
        async with connect(gateway) as client:
            await client.send(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert (await client.rest()).startswith(b"HTTP/1.1 200")
        async with connect(gateway) as client:
            await client.send(post(CHAT, headers="Expect: 100-continue\r\n").removesuffix(CHAT))
            assert (await client.head())[0] == 100
            await client.send(CHAT)
            assert (await client.answer()).status == 200


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with served() as gateway, connect(gateway) as client:
        await client.send(GET + post(CHAT) + b"GET /none HTTP/1.1\r\n\r\n" + GET)
        assert [(await client.answer()).status for _ in range(4)] == [200, 200, 404, 200]


async def test_a_pipeline_has_a_bound_and_what_it_has_taken_is_answered() -> None:
    async with served(script=Script(HELLO, pause_after=1)) as gateway, connect(gateway) as client:
        await client.send(post(STREAM))
        await gateway.dispatcher.submitted.wait()
        await client.send(GET * 2_000)
        await until(lambda: len(one_protocol(gateway).pipeline) == MAX_PIPELINED)
        gateway.dispatcher.script.resume.set()
        assert b"[DONE]" in (await client.answer()).body
        answers = [await client.answer() for _ in range(MAX_PIPELINED)]
        assert {answer.status for answer in answers} == {200}
        assert answers[-1].headers["connection"] == "close" and await client.rest() == b""


def one_protocol(gateway: Gateway) -> Any:
    (connection,) = gateway.connections._open
    return connection


async def test_an_incomplete_head_behind_a_stream_does_not_end_the_stream() -> None:
    async with served(HASTY, Script(HELLO, pause_after=1)) as gateway, connect(gateway) as client:
        await client.send(post(STREAM) + b"GET /half")
        await until(lambda: gateway.connections.counts["heads"] == 1)
        await until(lambda: gateway.connections.counts["heads"] == 0)  # its time is over
        gateway.dispatcher.script.resume.set()
        assert b"[DONE]" in (await client.answer()).body
        assert await client.rest() == b""


@pytest.mark.parametrize("ending", ["close", "half close"])
@pytest.mark.parametrize("follows", [b"", GET], ids=["alone", "pipelined"])
async def test_a_client_that_leaves_is_noticed(ending: str, follows: bytes) -> None:
    async with served(script=Script(HELLO, pause_after=1)) as gateway, connect(gateway) as client:
        await client.send(post(STREAM) + follows)
        assert (await client.head())[0] == 200
        client.close() if ending == "close" else client.half_close()
        await asyncio.wait_for(gateway.dispatcher.last.closed.wait(), 20)
        assert not gateway.dispatcher.last.ended


async def test_an_upgrade_is_answered_and_what_follows_is_discarded() -> None:
    upgrade = b"GET /run HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with served() as gateway, connect(gateway) as client:
        await client.send(upgrade + b"\x81\x85 no HTTP")
        answer = await client.answer()
        assert answer.status == 400 and "websocket" in answer.json()["message"]
        assert await client.rest() == b""


H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"


@pytest.mark.parametrize("num_first", [0, 10, 10**6], ids=["head first", "in the midst", "at once"])
@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_the_body_of_a_request_that_asks_for_another_protocol_is_read(framing: str, num_first: int) -> None:
    """As Java's HttpClient sends the first request of a connection. The connection lives on."""
    request = post(CHAT, headers=H2C)
    if framing == "chunks":
        request = chunked(CHAT[:20], CHAT[20:]).replace(b"\r\n\r\n", b"\r\n" + H2C.encode() + b"\r\n", 1)
    end_of_head = request.index(b"\r\n\r\n") + 4
    requests = request + request + GET
    async with served() as gateway, connect(gateway) as client:
        await client.send(requests[: end_of_head + num_first])
        await until(lambda: bool(gateway.connections.counts["open"]))
        await client.send(requests[end_of_head + num_first :])
        for _ in range(2):
            answer = await client.answer()
            assert answer.status == 200, answer.body
            assert answer.json()["choices"][0]["message"]["content"] == "Hello world, how are you"
        assert (await client.answer()).status == 200


async def test_a_body_behind_an_upgrade_has_the_same_bounds() -> None:
    async with served() as gateway, connect(gateway) as client:
        await client.send(post(b"", length=10**12, headers=H2C))
        answer = await client.answer()
        assert answer.status == 413 and "more than 100,000 bytes" in answer.message
    async with served(HASTY) as gateway, connect(gateway) as client:
        await client.send(post(CHAT[:5], length=len(CHAT), headers=H2C))
        assert (await client.answer()).status == 408


@pytest.mark.parametrize(("believed", "scheme"), [((), "http"), (("127.0.0.0/8",), "https"), (("10.0.0.1",), "http")])
async def test_forwarded_addresses_and_schemes_are_believed_of_named_proxies_only(
    believed: tuple[str, ...], scheme: str
) -> None:
    headers = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"}
    async with serve(ScriptedDispatcher(Script(HELLO)), forwarded_allow_ips=believed) as gateway:
        document = (await gateway.client.get("/openapi.json", headers=headers)).json()
        assert [server["url"] for server in document["servers"]] == [gateway.url.replace("http", scheme)]


# ------------------------------------------------------------------------------------------------------------ bodies


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
async def test_a_body_that_is_too_large_is_refused_before_it_is_sent(expect: str) -> None:
    async with served() as gateway, connect(gateway) as client:
        await client.send(post(b"", length=10**12, headers=expect))
        answer = await client.answer()
        assert answer.status == 413 and "more than 100,000 bytes" in answer.message
        assert answer.headers["connection"] == "close" and await client.rest() == b""


async def test_the_answer_reaches_a_client_that_sends_on() -> None:
    """A close with unread bytes would be a reset, and the answer lost."""
    async with served() as gateway:
        for request in (post(b"", length=10**12), post(b"", "/none", length=10**12), chunked(end=b"")):
            async with connect(gateway) as client:
                await client.send(request)
                sending = asyncio.ensure_future(send_on(client, b"ffff\r\n" + b"a" * 65_535 + b"\r\n"))
                answer = await client.answer()
                assert answer.status in (413, 404)
                assert await client.rest() == b""
                sending.cancel()
                await asyncio.wait({sending})


async def send_on(client: RawClient, data: bytes) -> None:
    while True:
        await client.send(data)


async def test_a_small_rest_after_an_early_answer_keeps_the_connection() -> None:
    async with served() as gateway, connect(gateway) as client:
        await client.send(post(b"a" * 10, "/none", length=1_000))
        assert (await client.answer()).status == 404
        await client.send(b"a" * 990 + GET)
        assert (await client.answer()).status == 200


async def test_a_body_that_stalls_is_refused_and_nothing_is_submitted() -> None:
    async with served(replace(HASTY, min_body_bytes_per_second=1)) as gateway:
        for request in (post(CHAT[:5], length=50), chunked(CHAT[:5], end=b"")):
            async with connect(gateway) as client:
                await client.send(request)
                answer = await client.answer()
                assert answer.status == 408 and "no byte of the body came for 0.2 s" in answer.message
                assert await client.rest() == b""
        assert gateway.dispatcher.requests == []


async def test_a_body_that_drips_is_refused() -> None:
    limits = replace(HASTY, body_stall_seconds=0.5)  # on a slow host a drip may come late, and would be a stall
    async with served(limits) as gateway, connect(gateway) as client:
        await client.send(post(b"", length=90_000))
        assert await client.drip(b"a") == b"H"
        assert b"the least is 1,024" in await client.rest()


async def test_a_body_of_crumbs_is_refused() -> None:
    limits = replace(PATIENT, max_head_bytes=1_000, max_body_bytes=1_000_000)
    async with served(limits) as gateway, connect(gateway) as client:
        await client.send(chunked(*[b"a"] * 50_000))
        answer = await client.answer()
        assert answer.status == 400 and "send larger chunks" in answer.message


@pytest.mark.parametrize("end", [b"0;" + b"a" * 50_000, b"0\r\nx: " + b"a" * 50_000], ids=["extension", "trailer"])
async def test_what_surrounds_a_body_has_a_bound(end: bytes) -> None:
    async with served() as gateway, connect(gateway) as client:
        await client.send(chunked(CHAT, end=end))
        assert (await client.answer()).status == 400


async def test_bodies_in_flight_have_a_bound_and_their_end_makes_room() -> None:
    limits = replace(PATIENT, max_bodies_bytes=100_000, grace_seconds=60.0)
    async with served(limits) as gateway, connect(gateway) as first, connect(gateway) as second:
        large = msgspec.json.encode({"model": "demo", "prompt": "a", "user": "b" * 60_000})
        await first.send(post(large[:-10], "/v1/completions", length=len(large)))
        await until(lambda: gateway.connections.num_body_bytes == len(large) - 10)
        await second.send(post(b"", "/v1/completions", length=len(large)))
        refused = await second.answer()
        assert refused.status == 503 and "the limit is 100,000" in refused.message and refused.headers["retry-after"]
        async with connect(gateway) as third:
            await third.send(chunked(large[:50_000], end=b"", path="/v1/completions"))
            assert (await third.answer()).status == 503
        async with connect(gateway) as fourth:
            await fourth.send(post(CHAT))
            assert (await fourth.answer()).status == 200
        await first.send(large[-10:])
        assert (await first.answer()).status == 200
        assert gateway.connections.num_body_bytes == 0


async def test_an_account_s_bodies_have_a_bound_of_their_own_until_they_are_prepared() -> None:
    limits = replace(PATIENT, max_account_bodies_bytes=100_000, grace_seconds=60.0)
    async with served(limits) as gateway, connect(gateway) as first, connect(gateway) as second:
        large = msgspec.json.encode({"model": "demo", "prompt": "a", "user": "b" * 60_000})
        await first.send(post(large[:-10], "/client/v4/accounts/a/ai/v1/completions", length=len(large)))
        await until(lambda: gateway.connections.num_body_bytes == len(large) - 10)
        await second.send(post(b"", "/client/v4/accounts/a/ai/v1/completions", length=len(large)))
        refused = await second.answer()
        assert refused.status == 429 and b"--max-account-bodies-bytes" in refused.body
        assert refused.headers["retry-after"]
        async with connect(gateway) as other:
            await other.send(post(large, "/client/v4/accounts/b/ai/v1/completions"))
            assert (await other.answer()).status == 200
        await first.send(large[-10:])
        assert (await first.answer()).status == 200


async def test_a_prepared_body_no_longer_counts_while_its_answer_is_made() -> None:
    async with served(script=Script(HELLO, pause_after=1)) as gateway, connect(gateway) as client:
        await client.send(post(CHAT + b" " * 50_000))
        await asyncio.wait_for(gateway.dispatcher.submitted.wait(), 10)
        assert gateway.connections.num_body_bytes == 0


async def test_a_body_that_does_not_move_makes_room_for_one_that_does() -> None:
    limits = replace(PATIENT, max_bodies_bytes=100_000, grace_seconds=0.05, sweep_seconds=60.0)
    async with served(limits) as gateway, connect(gateway) as idle:
        await idle.send(post(b"a" * 80_000, length=90_000))
        await until(lambda: gateway.connections.num_body_bytes == 80_000)
        (body,) = gateway.connections._bodies.values()
        await until(lambda: gateway.connections.now() - body.progressed > 0.05)
        async with connect(gateway) as client:
            await client.send(post(CHAT + b" " * 50_000))
            assert (await client.answer()).status == 200
        assert (await idle.answer()).status == 408


async def test_a_stream_holds_none_of_the_room_for_bodies() -> None:
    async with served(script=Script(HELLO, pause_after=1)) as gateway, connect(gateway) as client:
        await client.send(post(STREAM + b" " * 50_000))
        assert (await client.head())[0] == 200
        assert gateway.connections.num_body_bytes == 0 and gateway.connections.counts["bodies"] == 0


# ------------------------------------------------------------------------------------------------------------- crowds


async def test_a_burst_of_connections_is_accepted_in_many_turns_of_the_loop_and_none_is_lost() -> None:
    """Each turn accepts 64: a turn that accepted all would delay every stream."""
    limits = replace(PATIENT, max_unfinished_heads=10_000)
    async with served(limits) as gateway:
        host, _, port = gateway.url.removeprefix("http://").rpartition(":")
        sockets = [socket.create_connection((host, int(port))) for _ in range(600)]  # the loop does not turn meanwhile
        accepted = []
        while gateway.connections.counts["open"] < 600:
            await asyncio.sleep(0)
            accepted.append(gateway.connections.counts["open"])
        steps = [after - before for before, after in pairwise([0, *accepted])]
        assert max(steps) <= 64 and sum(steps) == 600
        for each in sockets:
            each.close()


async def test_five_hundred_half_heads_and_two_hundred_slow_bodies_are_closed_and_the_service_goes_on() -> None:
    limits = replace(HASTY, max_unfinished_heads=10_000, head_seconds=1.0, body_stall_seconds=1.0)
    async with served(limits) as gateway, AsyncExitStack() as stack:
        clients = []
        for sent in [b"GET /healthz HTTP/1.1\r\nx: "] * 500 + [post(b"{", length=50_000)] * 200:
            clients.append(await stack.enter_async_context(connect(gateway)))
            await clients[-1].send(sent)  # at once: its time counts from here, however slow the host is
        answer = await gateway.client.post("/v1/chat/completions", content=CHAT)
        assert answer.status_code == 200
        assert [(await client.answer()).status for client in clients] == [408] * 700
