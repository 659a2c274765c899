"""Heads that no client of ours sends are refused: other hosts on loopback, pages of other sites, giant values."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.api.http.bounds import MAX_TOKEN_CHARACTERS
from control_plane.api.http.request_context import HttpSettings
from control_plane.api.http.request_guard import LOCAL_HOSTS, is_loopback_name
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello"), 1]
CHAT = b'{"model": "demo", "messages": [{"role": "user", "content": "hi"}]}'
LOOPBACK = HttpSettings(allowed_hosts=(*LOCAL_HOSTS, "proxy.example"))
FORMS: list[str | None] = [None, "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded",
                           "multipart/form-data; boundary=x", "Text/Plain"]  # fmt: skip


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8642", "a.localhost", "127.0.0.1:8642", "127.1.2.3", "[::1]:8642", "localhost.",
     "workers-binding.ai", "host.docker.internal:8642", "Proxy.Example"],
)  # fmt: skip
async def test_this_machines_names_and_the_operators_are_answered(host: str) -> None:
    async with serve(settings=LOOPBACK) as gateway:
        assert (await gateway.client.get("/healthz", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8642", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0", "8.8.8.8"],
)
@pytest.mark.parametrize("path", ["/healthz", "/v1/workers", "/none", "/client/v4/accounts/me/ai/models/search"])
async def test_a_name_that_points_to_loopback_reads_nothing(host: str, path: str) -> None:
    async with serve(settings=LOOPBACK) as gateway:
        answer = await gateway.client.get(path, headers={"host": host})
    assert answer.status_code == 403 and f"--allowed-hosts {host.partition(':')[0]}" in answer.text


async def test_a_gateway_beyond_loopback_has_any_name_and_a_star_allows_any() -> None:
    for allowed in (None, ("*",)):
        async with serve(settings=HttpSettings(allowed_hosts=allowed)) as gateway:
            assert (await gateway.client.get("/healthz", headers={"host": "evil.example"})).status_code == 200


@pytest.mark.parametrize("host", ["a b", "user@localhost", "localhost/..", "localhost:port", "a" * 300, "[::1", "é"])
async def test_a_host_is_a_host(host: str) -> None:
    async with serve() as gateway:
        answer = await gateway.client.get("/healthz", headers=[(b"host", host.encode())])
    assert answer.status_code == 400 and "no host name" in answer.text and len(answer.text) < 300


def test_loopback_names() -> None:
    assert all(map(is_loopback_name, ("localhost", "x.localhost", "127.8.8.8", "[::1]", "::1")))
    assert not any(map(is_loopback_name, ("localhost.example", "10.0.0.1", "[::2]", "", "localhos")))


@pytest.mark.parametrize("content_type", FORMS)
@pytest.mark.parametrize(
    "origin",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://[::1"},
        {"sec-fetch-site": "cross-site", "origin": "https://evil.example"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=["origin", "null", "odd origin", "cross-site", "same-site"],
)
async def test_a_page_of_another_site_starts_no_work(content_type: str | None, origin: dict[str, str]) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        headers = origin | ({} if content_type is None else {"content-type": content_type})
        answer = await gateway.client.post("/v1/chat/completions", content=CHAT, headers=headers)
        assert answer.status_code == 403 and "another site" in answer.json()["error"]["message"]
        assert gateway.dispatcher.requests == []
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("content_type", [*FORMS, "application/json"])
async def test_clients_that_are_no_browsers_and_our_own_pages_go_on(content_type: str | None) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        ours: list[dict[str, str]] = [
            {},
            {"origin": gateway.url},
            {"sec-fetch-site": "same-origin", "origin": gateway.url},
            {"sec-fetch-site": "none"},
            {"authorization": "Bearer any", "origin": "https://app.example"},
        ]
        if content_type == "application/json":  # a browser asks before it sends this, and gets no permission
            ours.append({"origin": "https://app.example", "sec-fetch-site": "cross-site"})
        for headers in ours:
            headers |= {} if content_type is None else {"content-type": content_type}
            answer = await gateway.client.post("/v1/chat/completions", content=CHAT, headers=headers)
            assert answer.status_code == 200, headers


async def test_a_browser_that_asks_first_gets_no_permission() -> None:
    asking = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    async with serve() as gateway:
        answer = await gateway.client.options("/v1/chat/completions", headers=asking)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("name", ["authorization", "x-auth-key"])
async def test_a_giant_token_is_refused_by_the_name_of_its_header(name: str) -> None:
    async with serve() as gateway:
        answer = await gateway.client.get("/v1/models", headers={name: "a" * (MAX_TOKEN_CHARACTERS + 1)})
    assert answer.status_code == 400 and f"{name} has 4,097 characters, the limit is 4,096" in answer.text


@pytest.mark.parametrize(
    ("path", "headers", "body", "words"),
    [
        ("/v1/chat/completions", {"x-session-affinity": "a" * 257}, {"model": "demo", "messages": []},
         "x-session-affinity has 257 characters, the limit is 256"),
        ("/client/v4/accounts/me/ai/run/demo", {"x-session-affinity": "a" * 257}, {"prompt": "hi"},
         "x-session-affinity has 257 characters"),
        ("/client/v4/accounts/me/ai/run/" + "a" * 257, {}, {"prompt": "hi"}, "model has 257 characters"),
        ("/client/v4/accounts/me/ai/run", {}, {"model": "a" * 10_000, "input": {"prompt": "hi"}}, "model has 10,000"),
        ("/run", {"cf-consn-model-id": "a" * 257}, {"inputs": {"prompt": "hi"}}, "model has 257 characters"),
        ("/client/v4/accounts/" + "a" * 65 + "/ai/run/demo", {}, {"prompt": "hi"}, "up to 64 printable characters"),
    ],
)  # fmt: skip
async def test_names_in_headers_and_paths_have_lengths(
    path: str, headers: dict[str, str], body: dict[str, Any], words: str
) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        answer = await gateway.client.post(path, json=body, headers=headers)
        assert answer.status_code == 400 and words in answer.text and gateway.dispatcher.requests == []
