"""Every endpoint requires a token, and refuses in its own error format."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
from cloudflare import AsyncCloudflare
from cloudflare import AuthenticationError as CloudflareAuthenticationError

from control_plane.accounts.authenticator import STALE_SECONDS
from control_plane.accounts.service import Accounts
from control_plane.accounts.store import LAST_MS
from control_plane.accounts.tokens import new_secret
from control_plane.api.http.authentication import needed_scope
from control_plane.api.http.request_context import HttpSettings
from control_plane.storage.tables import tokens
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

RUN = "/client/v4/accounts/{account}/ai/run/@tandem/demo"
BINDING = {"cf-consn-model-id": "@tandem/demo"}


@dataclass
class World:
    gateway: Gateway
    accounts: Accounts
    admin: str
    mine: str
    """Of account me: inference."""

    def ask(self, path: str, secret: str | None = None, **options: Any) -> Any:
        headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
        method = options.pop("method", "POST")
        headers |= options.pop("headers", {})
        return self.gateway.client.request(method, path, headers=headers, **options)


@asynccontextmanager
async def world(accounts: Accounts, **settings: Any) -> AsyncIterator[World]:
    """A gateway with two accounts: chief, whose token is an admin's, and me."""
    secrets = {}
    for name, scope in (("chief", "admin"), ("me", "inference")):
        await accounts.store.create(name)
        _, secrets[name] = await accounts.store.create_token(name, "first", [scope])
    accounts.authenticator.forget()
    dispatcher = ScriptedDispatcher(Script([*ids_of("Hello"), 1]))
    async with serve(dispatcher, settings=HttpSettings(**settings), accounts=accounts) as gateway:
        yield World(gateway, accounts, secrets["chief"], secrets["me"])


async def test_without_any_account_no_token_is_needed_but_nobody_administers(accounts: Accounts) -> None:
    async with serve(ScriptedDispatcher(Script([*ids_of("Hello"), 1])), accounts=accounts) as gateway:
        for account in ("default", "anything"):
            path = RUN.format(account=account)
            headers = {"authorization": "Bearer unused"}
            answer = await gateway.client.post(path, json={"prompt": "hi"}, headers=headers)
            assert answer.status_code == 200, answer.text
        assert [request.account for request in gateway.dispatcher.requests] == ["default", "anything"]
        assert (await gateway.client.get("/v1/workers")).status_code == 200
        refused = await gateway.client.post("/client/v4/accounts", json={"name": "mine"})
        assert refused.status_code == 403 and "python -m control_plane account create" in refused.text
        assert not await accounts.store.exists_any()


@pytest.mark.parametrize("secret", [None, "unused", new_secret()])
async def test_each_endpoint_says_401_in_its_own_words(accounts: Accounts, secret: str | None) -> None:
    async with world(accounts) as here:
        rest = await here.ask(RUN.format(account="me"), secret, json={"prompt": "hi"})
        chat = await here.ask("/v1/chat/completions", secret, json={"model": "demo", "messages": []})
        binding = await here.ask("/run", secret, json={"inputs": {"prompt": "hi"}}, headers=BINDING)
        search = await here.ask("/ai-api/models/search", secret, method="GET")
        nothing = await here.ask("/no/such/path", secret, method="GET")
    for answer in (rest, chat, binding, search, nothing):
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", answer.text
        assert answer.headers["cf-ai-req-id"]
    body = rest.json()
    assert body["success"] is False and body["result"] is None and body["errors"][0]["code"] == 10000
    assert "API token" in body["errors"][0]["message"]
    error = chat.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert binding.json()["internalCode"] == 10000 and binding.json()["name"] == "InferenceUpstreamError"
    assert search.json()["errors"][0]["code"] == 10000
    assert here.gateway.dispatcher.requests == []


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/health", "/ping"])
async def test_what_monitors_and_browsers_ask_first_is_open(accounts: Accounts, path: str) -> None:
    async with world(accounts) as here:
        assert (await here.ask(path, method="GET")).status_code == 200


async def test_the_account_is_the_tokens_on_every_endpoint(accounts: Accounts) -> None:
    async with world(accounts) as here:
        chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        answers = [
            await here.ask(RUN.format(account="me"), here.mine, json={"prompt": "hi"}),
            await here.ask("/v1/chat/completions", here.mine, json=chat),
            await here.ask("/client/v4/accounts/me/ai/v1/chat/completions", here.mine, json=chat),
            await here.ask("/run", here.mine, json={"inputs": {"prompt": "hi"}}, headers=BINDING),
            await here.ask("/run", json={"inputs": {"prompt": "hi"}}, headers=BINDING | {"X-Auth-Key": here.mine}),
        ]
        assert [answer.status_code for answer in answers] == [200] * 5
        assert [request.account for request in here.gateway.dispatcher.requests] == ["me"] * 5


async def test_another_accounts_path_is_403_except_for_an_admin(accounts: Accounts) -> None:
    async with world(accounts) as here:
        for path in ("/client/v4/accounts/chief/ai/run/demo", "/client/v4/accounts/chief/ai/v1/chat/completions"):
            refused = await here.ask(path, here.mine, json={"prompt": "hi"})
            assert refused.status_code == 403, refused.text
            assert refused.json()["errors"][0]["code"] == 10000 and "not chief" in refused.text
        encoded = await here.ask("/client/v4/accounts/ro%6ft/ai/run/demo", here.mine, json={"prompt": "hi"})
        assert encoded.status_code == 403
        assert here.gateway.dispatcher.requests == []
        answer = await here.ask(RUN.format(account="me"), here.admin, json={"prompt": "hi"})
        assert answer.status_code == 200 and here.gateway.dispatcher.requests[0].account == "me"
        unknown = await here.ask(RUN.format(account="nobody"), here.admin, json={"prompt": "hi"})
        assert unknown.status_code == 404 and "no account nobody" in unknown.text


async def test_only_an_admin_or_who_started_it_sees_the_fleet(accounts: Accounts) -> None:
    async with world(accounts, operator_token="started-by-tandem-up") as here:
        statuses = [
            (await here.ask("/v1/workers", secret, method="GET")).status_code
            for secret in (None, here.mine, here.admin, "started-by-tandem-up", "started-by-tandem")
        ]
        elsewhere = await here.ask("/v1/models", "started-by-tandem-up", method="GET")
    assert statuses == [401, 403, 200, 200, 401] and elsewhere.status_code == 401


@pytest.mark.parametrize("path", ["/metrics", "/v1/metrics/targets"])
async def test_metrics_are_for_an_admin_and_for_the_operator(accounts: Accounts, path: str) -> None:
    async with serve(accounts=accounts) as gateway:
        assert (await gateway.client.get(path)).status_code == 200, "open while no account exists"
    async with world(accounts, operator_token="op") as here:
        statuses = [
            (await here.ask(path, secret, method="GET")).status_code for secret in (None, here.mine, here.admin, "op")
        ]
    assert statuses == [401, 403, 200, 200]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/events"),
        ("POST", "/v1/workers/decode-0/drain"),
        ("POST", "/v1/workers/decode-0/resume"),
        ("POST", "/v1/workers/decode-0/probe"),
    ],
)
async def test_events_and_drains_are_for_an_admin_and_for_the_operator(
    accounts: Accounts, method: str, path: str
) -> None:
    async with world(accounts, operator_token="op") as here:
        statuses = [(await here.ask(path, secret, method=method)).status_code for secret in (None, here.mine)]
        assert statuses == [401, 403]
        for secret in (here.admin, "op"):  # permitted; this gateway has no fleet and keeps no events
            answer = await here.ask(path, secret, method=method)
            assert (answer.status_code, "this gateway" in answer.text) == (400, True)


async def test_the_page_is_open_and_what_it_shows_live_is_for_operators(accounts: Accounts) -> None:
    async with world(accounts, operator_token="op") as here:
        page = await here.ask("/", method="GET")
        (script,) = re.findall(r'src="(/ui/[^"]+)"', page.text)
        assert (page.status_code, (await here.ask(script, method="GET")).status_code) == (200, 200)
        statuses = [(await here.ask("/v1/live", secret, method="GET")).status_code for secret in (None, here.mine)]
        assert statuses == [401, 403]
        for secret in (here.admin, "op"):  # permitted; this gateway has no feed
            assert (await here.ask("/v1/live", secret, method="GET")).status_code == 503


async def test_readiness_tells_its_reasons_to_who_may_see_the_fleet(accounts: Accounts) -> None:
    async with world(accounts, operator_token="op") as here:
        reason = {"reason": "decode-0 cannot be reached at 10.0.0.7:50051", "models": ["secret"]}
        here.gateway.readiness.answer = (False, {"ready": False, **reason})
        for secret in (None, "unused", new_secret(), here.mine):
            answer = await here.ask("/readyz", secret, method="GET")
            assert (answer.status_code, answer.json()) == (503, {"ready": False})
        for secret in ("op", here.admin):
            answer = await here.ask("/readyz", secret, method="GET")
            assert (answer.status_code, answer.json()) == (503, {"ready": False, **reason})


async def test_no_operator_token_is_no_token(accounts: Accounts) -> None:
    async with world(accounts) as here:
        for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Basic eDp5"}):
            assert (await here.ask("/v1/workers", headers=headers, method="GET")).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", "/run", "inference"),
        ("GET", "/v1/models", "inference"),
        ("POST", "/client/v4/accounts/a/ai/run/@cf/x/tokens", "inference"),
        ("POST", "/client/v4/accounts/a/ai/run", "inference"),
        ("GET", "/client/v4/accounts/a/ai/usage", "usage"),
        ("GET", "/client/v4/accounts", None),
        ("POST", "/client/v4/accounts", "admin"),
        ("GET", "/client/v4/accounts/a", None),
        ("PATCH", "/client/v4/accounts/a", "admin"),
        ("GET", "/client/v4/accounts/a/tokens", "admin"),
        ("GET", "/client/v4/accounts/a/tokens/t", "admin"),
        ("GET", "/client/v4/accounts/a/tokens/verify", None),
        ("DELETE", "/client/v4/accounts/a/tokens/verify", "admin"),
        ("PUT", "/client/v4/accounts/a/tokens/t/value", "admin"),
        ("GET", "/client/v4/user/tokens/verify", None),
        ("GET", "/admin/usage", "admin"),
        ("GET", "/v1/workers", "admin"),
        ("POST", "/v1/workers/decode-0/drain", "admin"),
        ("POST", "/v1/workers/decode-0/resume", "admin"),
        ("POST", "/v1/workers/decode-0/probe", "admin"),
        ("POST", "/v1/rolls", "admin"),
        ("GET", "/v1/events", "admin"),
    ],
)
def test_each_endpoint_needs_its_scope(method: str, path: str, scope: str | None) -> None:
    assert needed_scope(method, path) == scope


async def test_the_sdks_raise_their_own_authentication_errors(accounts: Accounts) -> None:
    async with world(accounts) as here:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        base_url = f"{here.gateway.url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=here.mine) as good:
            assert (await good.chat.completions.create(model="demo", messages=messages)).choices[0].message.content
        async with openai.AsyncOpenAI(base_url=base_url, api_key="tdm_wrong") as bad:
            with pytest.raises(openai.AuthenticationError, match="the API token is not known"):
                await bad.chat.completions.create(model="demo", messages=messages)
        base_url = f"{here.gateway.url}/client/v4"
        async with AsyncCloudflare(base_url=base_url, api_token=here.mine) as cloudflare:
            verified = await cloudflare.user.tokens.verify()
            assert verified is not None and verified.status == "active"
            assert await cloudflare.ai.run("demo", account_id="me", prompt="hi")
        async with AsyncCloudflare(base_url=base_url, api_token="x") as nobody:
            with pytest.raises(CloudflareAuthenticationError) as refusal:
                await nobody.ai.run("demo", account_id="me", prompt="hi")
        assert refusal.value.errors[0].code == 10000


async def test_a_token_that_ends_beyond_the_calendar_can_be_listed(accounts: Accounts) -> None:
    async with world(accounts) as here:
        async with accounts.database.begin() as connection:
            await connection.execute(sa.update(tokens).values(expires_ms=LAST_MS + 43_200_000))
        listed = (await here.ask("/client/v4/accounts/me/tokens", here.admin, method="GET")).json()["result"]
    assert [token["expires_on"] for token in listed] == ["9999-12-31T23:59:59Z"]


async def test_accounts_and_tokens_are_administered_over_http(accounts: Accounts) -> None:
    async with world(accounts) as here:

        async def call(method: str, path: str, body: Any = None, secret: str = here.admin) -> Any:
            answer: httpx.Response = await here.ask(f"/client/v4{path}", secret, method=method, json=body)
            document = answer.json()
            return document["result"] if answer.is_success else (answer.status_code, document["errors"][0]["message"])

        made = await call("POST", "/accounts", {"name": "team", "limits": {"requests_per_minute": 60}})
        nothing = {"tokens_per_minute": None, "concurrent_requests": None}
        assert made["id"] == made["name"] == "team" and made["limits"] == {"requests_per_minute": 60, **nothing}
        assert (await call("POST", "/accounts", {"name": "team"}))[0] == 409
        assert (await call("POST", "/accounts", {"name": "a/b"}))[0] == 400
        assert "did you mean limits" in (await call("POST", "/accounts", {"name": "x", "limit": {"a": 1}}))[1]
        assert [account["id"] for account in await call("GET", "/accounts")] == ["chief", "me", "team"]
        assert await call("GET", "/accounts?page=2") == []
        assert [account["id"] for account in await call("GET", "/accounts", secret=here.mine)] == ["me"]
        assert (await call("GET", "/accounts/team", secret=here.mine))[0] == 403
        assert (await call("POST", "/accounts", {"name": "x"}, secret=here.mine))[0] == 403

        changed = await call("PATCH", "/accounts/team", {"limits": {"tokens_per_minute": 5}})
        assert changed["limits"] == {"requests_per_minute": 60, "tokens_per_minute": 5, "concurrent_requests": None}
        changed = await call("PATCH", "/accounts/team", {"limits": {"requests_per_minute": None}, "disabled": True})
        assert changed["limits"]["requests_per_minute"] is None and changed["disabled"] is True
        assert (await call("PATCH", "/accounts/nobody", {"disabled": True}))[0] == 404
        await call("PATCH", "/accounts/team", {"disabled": False})

        token = await call("POST", "/accounts/team/tokens", {"name": "ci", "expires_on": "2099-01-01T00:00:00Z"})
        assert token["scopes"] == ["inference", "usage"] and token["expires_on"] == "2099-01-01T00:00:00Z"
        secret = token.pop("value")
        assert await call("GET", "/accounts/team/tokens") == [token]
        assert await call("GET", f"/accounts/team/tokens/{token['id']}") == token
        assert (await call("GET", "/accounts/team/tokens/verify", secret=secret))["id"] == token["id"]
        assert (await call("GET", f"/accounts/me/tokens/{token['id']}"))[0] == 404
        assert (
            "expires_on is 'soon'"
            in (await call("POST", "/accounts/me/tokens", {"name": "x", "expires_on": "soon"}))[1]
        )
        beyond = {"name": "x", "expires_on": "9999-12-31T23:59:59-12:00"}
        assert "after the year 9999" in (await call("POST", "/accounts/me/tokens", beyond))[1]
        last = await call("POST", "/accounts/me/tokens", {"name": "x", "expires_on": "9999-12-31T23:59:59Z"})
        assert last["expires_on"] == "9999-12-31T23:59:59Z" and len(await call("GET", "/accounts/me/tokens")) == 2
        rolled = await call("PUT", f"/accounts/team/tokens/{token['id']}/value")
        assert (await call("GET", "/user/tokens/verify", secret=secret))[0] == 401
        assert (await call("GET", "/user/tokens/verify", secret=rolled))["status"] == "active"
        assert await call("DELETE", f"/accounts/team/tokens/{token['id']}") == {"id": token["id"]}
        assert "is revoked" in (await call("GET", "/user/tokens/verify", secret=rolled))[1]
    assert STALE_SECONDS <= 5  # what the documents promise of other processes


@pytest.mark.parametrize("ending", ["%0A", "%0a", "%0D", "%00", "%7F"])
async def test_a_path_that_ends_in_a_control_character_is_nobodys(accounts: Accounts, ending: str) -> None:
    """A route's `$` also matches before a newline: what was checked as one path could be served as another."""
    administration = {"name": "x", "scopes": ["admin"]}
    async with world(accounts) as here:
        for path in ("/client/v4/accounts/me/tokens", "/client/v4/accounts", "/admin/usage", "/v1/workers"):
            for method in ("GET", "POST"):
                refused = await here.ask(path + ending, here.mine, method=method, json=administration)
                assert refused.status_code == 404, (path, method, refused.text)
        assert len(await accounts.store.all()) == 2
    async with serve(ScriptedDispatcher(Script([1])), accounts=accounts) as gateway:
        assert (await gateway.client.post("/client/v4/accounts" + ending, json={"name": "mine"})).status_code == 404


@pytest.mark.parametrize(
    "path", ["/admin/later", "/client/v4/later", "/client/v4/accounts/me/later", "/client/v4/user"]
)
def test_what_is_not_an_accounts_models_is_the_administrators(path: str) -> None:
    assert needed_scope("POST", path) == "admin"
