"""Answers, headers and the ledger have the same numbers, and limits hold over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from control_plane.accounts.errors import LimitReached
from control_plane.accounts.identity import Caller, Identity
from control_plane.accounts.limits import Limits, Window
from control_plane.accounts.metering import BilledRequest
from control_plane.accounts.prices import PriceTable
from control_plane.accounts.service import Accounts
from control_plane.drain import time_is_over
from control_plane.generation import TokenRequest
from control_plane.storage.database import database_url
from control_plane.storage.tables import ledger, windows
from tandem_runtime.errors import Overloaded, Unavailable
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import byte_level_tokenizer, ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher, ScriptedStream
from tests.control_plane.postgres import Postgres

HELLO = [*ids_of("Hello world"), 1]
BINDING = {"cf-consn-model-id": "@tandem/demo"}
PROMPT = "Once upon a time there was a small model"
NUM_PROMPT = 1 + len(ids_of(PROMPT))  # with <s>
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
PRICES = PriceTable.parse(["*=11/5.5/22"])  # 1, 0.5 and 2 neurons a token


@dataclass
class World:
    gateway: Gateway
    accounts: Accounts
    token_id: str

    async def rows(self) -> list[Any]:
        await self.accounts.metering.drain()
        async with self.accounts.database.each() as connection:
            return list(await connection.execute(sa.select(ledger).order_by(ledger.c.opened_ms, ledger.c.request_id)))

    async def row(self) -> Any:
        (row,) = await self.rows()
        return row

    async def window(self) -> Window:
        await self.accounts.metering.drain()
        async with self.accounts.database.each() as connection:
            return Window.decode(str(await connection.scalar(sa.select(windows.c.state))))


@asynccontextmanager
async def world(
    accounts: Accounts, script: Script | None = None, limits: Limits | None = None, timeout_seconds: float = 60.0
) -> AsyncIterator[World]:
    """A gateway with an account, whose token its client sends."""
    accounts.metering._prices = PRICES
    await accounts.store.create("me", limits or Limits())
    token, secret = await accounts.store.create_token("me", "first", ["inference", "usage"])
    accounts.authenticator.forget()
    dispatcher = ScriptedDispatcher(script or Script(HELLO, num_cached_tokens=2))
    async with serve(dispatcher, accounts=accounts, timeout_seconds=timeout_seconds) as gateway:
        gateway.client.headers["authorization"] = f"Bearer {secret}"
        yield World(gateway, accounts, token.id)


async def test_a_whole_answer_its_header_and_its_row_agree(accounts: Accounts) -> None:
    async with world(accounts) as here:
        body = {"prompt": PROMPT, "raw": True}
        answer = await here.gateway.client.post("/client/v4/accounts/me/ai/run/@tandem/demo", json=body)
        usage, row = answer.json()["result"]["usage"], await here.row()
    num_prompt = NUM_PROMPT
    assert usage == {
        "prompt_tokens": num_prompt,
        "completion_tokens": len(HELLO),
        "total_tokens": num_prompt + len(HELLO),
        "prompt_tokens_details": {"cached_tokens": 2},
        "neurons": num_prompt - 2 + 1.0 + 2 * len(HELLO),
    }
    assert float(answer.headers["cf-ai-neurons"]) == usage["neurons"]
    assert (row.request_id, row.account, row.token_id) == (answer.headers["cf-ai-req-id"], "me", here.token_id)
    assert (row.model, row.status, row.finish_reasons) == ("@tandem/demo", "finished", "stop")
    assert (row.num_asked_tokens, row.num_prompt_tokens, row.num_cached_tokens) == (num_prompt, num_prompt, 2)
    assert (row.num_completion_tokens, row.microneurons) == (len(HELLO), usage["neurons"] * 1e6)


@pytest.mark.parametrize("path", ["/run", "/client/v4/accounts/me/ai/run/demo", "/v1/chat/completions"])
async def test_a_streams_last_usage_is_its_rows(accounts: Accounts, path: str) -> None:
    async with world(accounts) as here:
        bodies: dict[str, Any] = {
            "/run": {"inputs": {"prompt": "hi", "stream": True}},
            "/v1/chat/completions": {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
        }
        body = bodies.get(path, {"prompt": "hi", "stream": True})
        answer = await here.gateway.client.post(path, json=body, headers=BINDING)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        usage, row = events[-1]["usage"], await here.row()
    assert usage["prompt_tokens"] == row.num_prompt_tokens == row.num_computed_tokens + row.num_cached_tokens
    assert usage["completion_tokens"] == row.num_completion_tokens == len(HELLO)
    assert usage["neurons"] * 1e6 == row.microneurons > 0
    assert "cf-ai-neurons" not in answer.headers and row.status == "finished"


async def test_the_tokenizer_counts_the_same(accounts: Accounts) -> None:
    async with world(accounts) as here:
        for prompt in ("a", PROMPT, "Ein Vogel 😀 " * 20):
            await here.gateway.client.post("/v1/completions", json={"model": "demo", "prompt": prompt})
        rows = await here.rows()
    encode = byte_level_tokenizer().encode
    assert sorted(row.num_prompt_tokens for row in rows) == sorted(
        len(encode(prompt).ids) for prompt in ("a", PROMPT, "Ein Vogel 😀 " * 20)
    )


async def test_several_prompts_of_one_request_have_a_row_each_and_one_price(accounts: Accounts) -> None:
    async with world(accounts) as here:
        body = {"model": "demo", "prompt": [PROMPT, "hi", "hello"], "n": 2}
        answer = await here.gateway.client.post("/v1/completions", json=body)
        rows, usage = await here.rows(), answer.json()["usage"]
    assert len(rows) == 3 and {row.num_choices for row in rows} == {2}
    assert sum(row.microneurons for row in rows) == round(float(answer.headers["cf-ai-neurons"]) * 1e6)
    assert usage["neurons"] == float(answer.headers["cf-ai-neurons"])
    assert sum(row.num_completion_tokens for row in rows) == usage["completion_tokens"] == 6 * len(HELLO)


async def test_a_client_that_leaves_pays_for_what_was_done(accounts: Accounts) -> None:
    script = Script(HELLO, pause_after=2)
    async with world(accounts, script, Limits(None, 1000, 3)) as here:
        body = {**CHAT, "stream": True}
        async with here.gateway.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()  # held, or the end of the loop would already leave
            async for line in lines:
                if "content" in line and '"content":""' not in line:
                    break
            assert (await here.window()).num_tokens > 256
        async with asyncio.timeout(10):
            await here.gateway.dispatcher.last.closed.wait()
        row, window = await here.row(), await here.window()
    assert (row.status, row.error, row.num_completion_tokens) == ("cancelled", "", 2)
    assert row.num_prompt_tokens == row.num_computed_tokens == row.num_asked_tokens
    assert window.running == {} and window.num_tokens == row.num_prompt_tokens + 2


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        (Script(HELLO, refuse=Overloaded("full", retry_after_seconds=1.0)), 429, "Overloaded"),
        (Script(HELLO, fail_after=0, failure=Unavailable("lost")), 503, "Unavailable"),
    ],
)
async def test_what_fails_before_its_first_token_costs_nothing(
    accounts: Accounts, script: Script, status: int, error: str
) -> None:
    async with world(accounts, script, Limits(None, 1000, 1)) as here:
        assert (await here.gateway.client.post("/v1/chat/completions", json=CHAT)).status_code == status
        row, window = await here.row(), await here.window()
    assert (row.status, row.error, row.num_prompt_tokens, row.microneurons) == ("failed", error, 0, 0)
    assert row.num_asked_tokens > 0 and window.running == {} and window.num_tokens == 0


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_what_a_gateway_cuts_at_its_end_is_aborted_with_the_tokens_its_client_got(
    accounts: Accounts, num_tokens: int
) -> None:
    script = Script(HELLO, fail_after=num_tokens, failure=time_is_over(), num_unfinished_tokens=NUM_PROMPT)
    async with world(accounts, script, Limits(None, 1000, 1)) as here:
        assert (await here.gateway.client.post("/v1/chat/completions", json=CHAT)).status_code == 503
        row, window = await here.row(), await here.window()
    assert (row.status, row.error, row.num_completion_tokens) == ("aborted", "GatewayDraining", num_tokens)
    assert (row.microneurons > 0) == (row.num_prompt_tokens > 0) == (num_tokens > 0)
    assert window.running == {}


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_client_that_does_not_read_while_its_gateway_ends_has_not_left(
    accounts: Accounts, num_tokens: int
) -> None:
    """The server cancels such a request last of all; its row is aborted, and without a token nothing is billed."""
    script = Script(HELLO, pause_after=num_tokens, num_unfinished_tokens=NUM_PROMPT)
    async with world(accounts, script) as here:
        asking = asyncio.create_task(here.gateway.client.post("/v1/chat/completions", json=CHAT))
        await here.gateway.dispatcher.waits_for_resume.wait()
        accounts.metering.gateway_ends()
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(10):
            await here.gateway.dispatcher.last.closed.wait()
        row = await here.row()
    assert (row.status, row.error, row.num_completion_tokens) == ("aborted", "GatewayDraining", num_tokens)
    assert (row.num_prompt_tokens > 0) == (num_tokens > 0)


@pytest.mark.parametrize("ends_by", ["leaving", "its own deadline"])
async def test_who_ends_a_request_before_its_first_token_pays_for_what_was_computed(
    accounts: Accounts, ends_by: str
) -> None:
    script = Script(HELLO, pause_after=0, num_unfinished_tokens=NUM_PROMPT - 3)
    seconds = 60.0 if ends_by == "leaving" else 0.2
    async with world(accounts, script, Limits(None, 1000, 1), timeout_seconds=seconds) as here:
        body = {"model": "demo", "prompt": PROMPT}
        if ends_by == "leaving":
            asking = asyncio.create_task(here.gateway.client.post("/v1/completions", json=body))
            await here.gateway.dispatcher.waits_for_resume.wait()
            asking.cancel()
            await asyncio.wait([asking])
        else:
            answer = await here.gateway.client.post("/v1/completions", json=body)
            assert answer.status_code == 504
        async with asyncio.timeout(10):
            await here.gateway.dispatcher.last.closed.wait()
        row, window = await here.row(), await here.window()
    assert (row.status, row.num_prompt_tokens, row.num_computed_tokens) == (
        ("cancelled" if ends_by == "leaving" else "failed"),
        NUM_PROMPT - 3,
        NUM_PROMPT - 3,
    )
    assert (row.num_asked_tokens, row.num_cached_tokens, row.num_completion_tokens) == (NUM_PROMPT, 0, 0)
    assert row.microneurons == (NUM_PROMPT - 3) * 1e6, "the price of computed tokens"
    assert window.running == {} and window.num_tokens == NUM_PROMPT - 3


async def test_limits_are_not_avoided_by_leaving_before_the_first_token(accounts: Accounts) -> None:
    """Finding 13: an account of 130,000 tokens a minute had any number of prompts of 128,000 computed."""
    caller = Caller("r", "me", identity=Identity("me", limits=Limits(max_tokens_per_minute=130_000)))

    async def leave(request_id: str) -> None:
        entry = await accounts.metering.admit(caller, BilledRequest(request_id, "m", 1, 128_000, 16))
        entry.close_unfinished("cancelled", computed)
        await accounts.metering.drain()

    async def computed() -> int:
        return 128_000

    await accounts.store.create("me")
    await leave("first")
    with pytest.raises(LimitReached):
        await leave("second")


async def test_what_no_worker_had_begun_costs_whoever_leaves_nothing(accounts: Accounts) -> None:
    async with world(accounts, Script(HELLO, pause_after=0), Limits(None, 1000, 1)) as here:
        asking = asyncio.create_task(here.gateway.client.post("/v1/chat/completions", json=CHAT))
        await here.gateway.dispatcher.waits_for_resume.wait()
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(10):
            await here.gateway.dispatcher.last.closed.wait()
        row, window = await here.row(), await here.window()
    assert (row.status, row.num_prompt_tokens, row.microneurons) == ("cancelled", 0, 0)
    assert window.running == {} and window.num_tokens == 0


async def test_what_is_refused_before_it_is_admitted_has_no_row(accounts: Accounts) -> None:
    async with world(accounts) as here:
        for body in ({**CHAT, "model": "nothing"}, {**CHAT, "messages": []}, {**CHAT, "max_tokens": -1}):
            assert (await here.gateway.client.post("/v1/chat/completions", json=body)).status_code in (400, 404)
        assert await here.rows() == []


async def test_while_the_database_is_away_no_worker_is_asked(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(accounts) as here:
        assert (await here.gateway.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        num_asked, ledger_of = len(here.gateway.dispatcher.requests), accounts.metering._ledger
        monkeypatch.setattr(accounts.database, "_down_until", float("inf"))
        for body in (CHAT, {**CHAT, "stream": True}):
            refused = await here.gateway.client.post("/v1/chat/completions", json=body)
            assert refused.status_code == 503 and "the database could not be reached" in refused.text
        assert len(here.gateway.dispatcher.requests) == num_asked
        assert not ledger_of._openings and not ledger_of._closings
        monkeypatch.undo()
        assert len(await here.rows()) == 1


async def test_a_name_that_no_database_can_hold_harms_nobody_else(accounts: Accounts) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO)), accounts=accounts) as gateway:
        http = gateway.client
        long = "x" * 65
        refused = await http.post(f"/client/v4/accounts/{long}/ai/run/demo", json={"prompt": "hi"})
        assert refused.status_code == 400 and "up to 64 printable characters" in refused.text
        assert (await http.get(f"/client/v4/accounts/{long}/ai/usage")).status_code == 400
        assert (await http.post("/client/v4/accounts/a%00b/ai/run/demo", json={"prompt": "hi"})).status_code == 404
        for query in ("model=%00", "model=" + "x" * 257):
            refused = await http.get(f"/client/v4/accounts/me/ai/usage?{query}")
            assert refused.status_code == 400 and "model is" in refused.text
        assert gateway.dispatcher.requests == [] and accounts.database.problem == ""
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        first = await http.get("/client/v4/accounts/me/ai/usage?to=0001-01-01")
        assert first.status_code == 200 and first.json()["result"] == []


@asynccontextmanager
async def full_disk(accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Let each write of the ledger fail as on a full disk, until the context ends."""

    def full(*_: Any) -> None:
        raise OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))

    async def write(*_: Any) -> None:
        await accounts.database.run(full)

    with monkeypatch.context() as patched:
        patched.setattr(accounts.metering._ledger, "_write", write)
        patched.setattr("control_plane.accounts.ledger._RETRY_SECONDS", 0.01)
        yield


async def fails(here: World, *, stream: bool) -> bool:
    """Send a chat, which gets a 503; return whether it got as far as the dispatcher."""
    num_before = len(here.gateway.dispatcher.requests)
    refused = await here.gateway.client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert refused.status_code == 503 and "the database cannot be used; try again" in refused.text
    assert refused.headers["retry-after"]
    return len(here.gateway.dispatcher.requests) > num_before


@pytest.mark.parametrize("stream", [False, True])
async def test_a_row_that_cannot_be_opened_ends_a_request_before_workers_have_accepted_it(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A request that waited for room, or for workers, got its 503 after that."""
    monkeypatch.setattr("control_plane.storage.database._PAUSE_SECONDS", 0.0)
    async with world(accounts, Script(HELLO, accept=asyncio.Event()), Limits(None, 1000, 1)) as here:
        async with asyncio.timeout(30), full_disk(accounts, monkeypatch):
            assert await fails(here, stream=stream)
            assert here.gateway.dispatcher.submit_cancelled.is_set() and not here.gateway.dispatcher.streams
        assert (await here.rows(), (await here.window()).running) == ([], {})


async def test_nothing_is_sent_to_workers_while_rows_cannot_be_opened(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("control_plane.storage.database._PAUSE_SECONDS", 0.0)
    async with world(accounts) as here:
        async with full_disk(accounts, monkeypatch):
            await fails(here, stream=False)
            for stream in (False, True, False):
                assert not await fails(here, stream=stream)
            assert not any(stream.num_generated for stream in here.gateway.dispatcher.streams)
        await accounts.metering.drain()
        for _ in range(2):
            assert (await here.gateway.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert [row.status for row in await here.rows()] == ["finished"] * 2


async def test_a_row_that_is_refused_after_workers_have_accepted_the_request_lets_nothing_run(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(accounts) as here:
        accepted = asyncio.Event()

        async def away(*_: Any) -> None:
            await accepted.wait()
            raise Unavailable("the database is away")

        submit = here.gateway.dispatcher.submit

        async def submitted(request: TokenRequest) -> ScriptedStream:
            stream = await submit(request)
            accepted.set()
            return stream

        monkeypatch.setattr(here.gateway.dispatcher, "submit", submitted)
        monkeypatch.setattr(accounts.metering._ledger, "_write", away)
        monkeypatch.setattr("control_plane.accounts.ledger._RETRY_SECONDS", 0.01)
        refused = await here.gateway.client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503 and "the database is away" in refused.text
        assert here.gateway.dispatcher.last.closed.is_set() and not here.gateway.dispatcher.last.num_generated
        monkeypatch.undo()
        assert await here.rows() == []


async def test_requests_a_minute_are_refused_in_each_endpoints_words(accounts: Accounts) -> None:
    async with world(accounts, limits=Limits(max_requests_per_minute=2)) as here:
        http = here.gateway.client
        for left in ("1", "0"):
            answer = await http.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200 and answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == left
            assert "x-ratelimit-limit-tokens" not in answer.headers
        chat = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        rest = await http.post("/client/v4/accounts/me/ai/run/demo", json={"prompt": "hi"})
        binding = await http.post("/run", json={"inputs": {"prompt": "hi"}}, headers=BINDING)
        for refused in (chat, rest, binding):
            assert refused.status_code == 429, refused.text
            assert 50 < int(refused.headers["retry-after"]) <= 61
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert chat.json()["error"]["type"] == "rate_limit_error"
        assert chat.json()["error"]["code"] == "rate_limit_exceeded"
        assert "account me has used its 2 requests a minute" in chat.json()["error"]["message"]
        assert rest.json()["errors"][0]["code"] == 3021
        assert binding.json()["internalCode"] == 3036  # the binding's clients know the status of documented codes only
        assert len(await here.rows()) == 2
        base_url, secret = f"{here.gateway.url}/v1", http.headers["authorization"].removeprefix("Bearer ")
        async with openai.AsyncOpenAI(base_url=base_url, api_key=secret, max_retries=0) as sdk:
            with pytest.raises(openai.RateLimitError, match="requests a minute"):
                await sdk.chat.completions.create(model="demo", messages=CHAT["messages"])


async def test_tokens_a_minute_count_what_was_used_not_what_was_asked(accounts: Accounts) -> None:
    async with world(accounts, limits=Limits(max_tokens_per_minute=300)) as here:
        http, body = here.gateway.client, {"model": "demo", "prompt": "hi", "max_tokens": 200}
        for _ in range(4):  # 200 each would be too much
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            await here.window()
        rows = await here.rows()
        used = sum(row.num_prompt_tokens + row.num_completion_tokens for row in rows)
        assert (await here.window()).num_tokens == used < 60
        too_long = await http.post("/v1/completions", json={"model": "demo", "prompt": [5] * 300})
        assert too_long.status_code == 400 and "the prompt has 300 tokens, account me may use 300" in too_long.text
        assert "retry-after" not in too_long.headers
        assert (await http.post("/v1/completions", json={**body, "prompt": [5] * 299})).status_code == 429
        assert (await http.post("/v1/completions", json={**body, "prompt": [5] * 60})).status_code == 200


async def test_requests_at_once_are_bounded_until_one_ends(accounts: Accounts) -> None:
    script = Script(HELLO, pause_after=0)
    async with world(accounts, script, Limits(max_concurrent_requests=2)) as here:
        running = [asyncio.create_task(here.gateway.client.post("/v1/chat/completions", json=CHAT)) for _ in range(2)]
        async with asyncio.timeout(10):
            while len(here.gateway.dispatcher.streams) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        refused = await here.gateway.client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert "has 2 requests running" in refused.json()["error"]["message"]
        script.resume.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]
        await here.accounts.metering.drain()
        assert (await here.gateway.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_an_account_reads_its_own_usage(accounts: Accounts) -> None:
    async with world(accounts) as here:
        http = here.gateway.client
        for _ in range(3):
            await http.post("/v1/completions", json={"model": "demo", "prompt": PROMPT})
        rows = await here.rows()
        answer = (await http.get("/client/v4/accounts/me/ai/usage")).json()
        (day,) = answer["result"]
        assert day["requests"] == 3 and day["account"] == "me" and day["model"] == "@tandem/demo"
        assert day["prompt_tokens"] == 3 * NUM_PROMPT == day["computed_tokens"] + day["cached_tokens"]
        assert day["neurons"] == sum(row.microneurons for row in rows) / 1e6
        assert day["cost_usd"] == pytest.approx(day["neurons"] * 0.000011)
        assert answer["result_info"]["total_count"] == 1
        assert (await http.get("/client/v4/accounts/me/ai/usage?page=2")).json()["result"] == []
        assert (await http.get("/client/v4/accounts/me/ai/usage?to=2020-01-01")).json()["result"] == []
        for query, why in (("from=soon", "from is 'soon'"), ("from=2999-01-01", "after to"), ("page=0", "page is '0'")):
            refused = await http.get(f"/client/v4/accounts/me/ai/usage?{query}")
            assert refused.status_code == 400 and why in refused.text
        assert (await http.get("/client/v4/accounts/you/ai/usage")).status_code == 403
        assert (await http.get("/admin/usage")).status_code == 403


async def test_without_accounts_the_ledger_has_the_urls_account(accounts: Accounts) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO)), accounts=accounts) as gateway:
        await gateway.client.post("/client/v4/accounts/team/ai/run/demo", json={"prompt": "hi"})
        await gateway.client.post("/v1/chat/completions", json=CHAT)
        await accounts.metering.drain()
        usage = (await gateway.client.get("/client/v4/accounts/team/ai/usage")).json()["result"]
        assert [row["account"] for row in usage] == ["team"]
    async with accounts.database.each() as connection:
        found = await connection.execute(sa.select(ledger.c.account, ledger.c.token_id).order_by(ledger.c.account))
    assert [tuple(row) for row in found] == [("default", None), ("team", None)]


async def test_a_gateway_without_its_database_is_alive_but_not_ready(postgres: Postgres, postgres_url: str) -> None:
    accounts = Accounts(database_url(postgres_url, Path()))
    await accounts.open()
    async with serve(accounts=accounts) as gateway:
        assert (await gateway.client.get("/readyz")).status_code == 200
        postgres.stop()
        try:
            with pytest.raises(Unavailable):
                await accounts.incarnations.beat()
            unready = await gateway.client.get("/readyz")
            assert unready.status_code == 503
            assert unready.json() == {"ready": False}
            refused = await gateway.client.post("/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503 and "127.0.0.1" not in refused.text and "postgres" not in refused.text
            assert "127.0.0.1" in accounts.database.problem
            assert (await gateway.client.get("/healthz")).status_code == 200
        finally:
            postgres.start()
        async with asyncio.timeout(30):
            while (await gateway.client.get("/readyz")).status_code != 200:
                with contextlib.suppress(Unavailable):
                    await accounts.incarnations.beat()
                await asyncio.sleep(0.05)
    await accounts.close()
