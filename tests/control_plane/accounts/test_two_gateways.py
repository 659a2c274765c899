"""Two gateway processes on one PostgreSQL share limits and ledger."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from control_plane.accounts.authenticator import STALE_SECONDS
from control_plane.accounts.ledger import GATEWAY_LOST
from control_plane.accounts.limits import Limits
from control_plane.accounts.service import Accounts
from control_plane.storage.database import Database, database_url
from control_plane.storage.tables import ledger
from tests.control_plane.accounts.gateway_process import HELLO, gateway_process

NUM_CLIENTS = 50


async def account(url: str, limits: Limits) -> str:
    """Make the tables and an account; returns a token."""
    accounts = Accounts(database_url(url, None))  # type: ignore[arg-type]
    await accounts.open()
    await accounts.store.create("me", limits)
    _, secret = await accounts.store.create_token("me", "first", ["admin"])
    await accounts.close()
    return secret


async def rows(url: str) -> list[Any]:
    database = Database(database_url(url, None))  # type: ignore[arg-type]
    async with database.each() as connection:
        found = list(await connection.execute(sa.select(ledger)))
    await database.close()
    return found


def client(url: str, secret: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {secret}"}
    return httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=60, verify=False)


async def test_of_fifty_clients_at_two_processes_exactly_the_limit_is_admitted(postgres_url: str) -> None:
    most, tries = 300, 14
    secret = await account(postgres_url, Limits(max_requests_per_minute=most))
    async with gateway_process(postgres_url) as one, gateway_process(postgres_url) as other:
        async with client(one.url, secret) as http_one, client(other.url, secret) as http_other:

            async def hammer(index: int) -> list[httpx.Response]:
                http = (http_one, http_other)[index % 2]
                body = {"model": "demo", "prompt": f"client {index}", "max_tokens": 3}
                return [await http.post("/v1/completions", json=body) for _ in range(tries)]

            async with asyncio.timeout(55):  # or the first of them would count no more
                lists = await asyncio.gather(*(hammer(index) for index in range(NUM_CLIENTS)))
        assert await one.end(signal.SIGTERM) == await other.end(signal.SIGTERM) == 0
    answers = [answer for answers in lists for answer in answers]
    assert Counter(answer.status_code for answer in answers) == {200: most, 429: NUM_CLIENTS * tries - most}
    admitted_at = Counter(str(answer.url.port) for answer in answers if answer.status_code == 200)
    assert len(admitted_at) == 2, admitted_at
    assert all(1 <= int(answer.headers["retry-after"]) <= 61 for answer in answers if answer.status_code == 429)
    found = await rows(postgres_url)
    assert Counter(row.status for row in found) == {"finished": most}
    assert len({row.gateway for row in found}) == 2


async def test_a_gateway_that_is_killed_leaves_aborted_rows_and_frees_what_it_held(postgres_url: str) -> None:
    secret = await account(postgres_url, Limits(max_concurrent_requests=3))
    async with gateway_process(postgres_url, 1.0) as victim, gateway_process(postgres_url, 1.0) as other:
        async with client(victim.url, secret) as http_victim, client(other.url, secret) as http_other:
            await http_victim.post("/v1/completions", json={"model": "demo", "prompt": "done", "max_tokens": 3})
            body = {"model": "demo", "prompt": "wait", "stream": True}

            async def hang() -> None:
                async with http_victim.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        streaming.release()
                    raise AssertionError("the stream ended well")

            streaming = asyncio.Semaphore(0)
            hanging = [asyncio.create_task(hang()) for _ in range(3)]
            for _ in range(3):
                await asyncio.wait_for(streaming.acquire(), 30)
            body = {"model": "demo", "prompt": "hi", "max_tokens": 3}
            assert (await http_other.post("/v1/completions", json=body)).status_code == 429
            await victim.end(signal.SIGKILL)
            for lost in await asyncio.gather(*hanging, return_exceptions=True):
                assert isinstance(lost, httpx.TransportError), lost
            async with asyncio.timeout(30):
                while (await http_other.post("/v1/completions", json=body)).status_code == 429:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        assert await other.end(signal.SIGTERM) == 0
    found = await rows(postgres_url)
    aborted = [row for row in found if row.status == "aborted"]
    assert [(row.error, row.num_prompt_tokens, row.num_completion_tokens) for row in aborted] == [
        (GATEWAY_LOST, 0, 0)
    ] * 3
    assert Counter(row.status for row in found) == {"aborted": 3, "finished": 2}


async def test_a_drain_loses_nothing_and_a_revocation_reaches_the_other_process(postgres_url: str) -> None:
    secret = await account(postgres_url, Limits())
    async with gateway_process(postgres_url) as one, gateway_process(postgres_url) as other:
        async with client(one.url, secret) as http_one, client(other.url, secret) as http_other:
            made = await http_one.post("/client/v4/accounts/me/tokens", json={"name": "short"})
            token = made.json()["result"]
            async with client(other.url, token["value"]) as short:
                body = {"model": "demo", "prompt": "hi", "max_tokens": 3}
                answers = await asyncio.gather(*(short.post("/v1/completions", json=body) for _ in range(40)))
                assert {answer.status_code for answer in answers} == {200}
                await http_one.delete(f"/client/v4/accounts/me/tokens/{token['id']}")
                started = asyncio.get_running_loop().time()
                while (await short.get("/v1/models")).status_code == 200:
                    assert asyncio.get_running_loop().time() - started < STALE_SECONDS + 30
                    await asyncio.sleep(0.05)
            used = await http_other.get("/client/v4/accounts/me/ai/usage")
            assert used.status_code == 200
        assert await other.end(signal.SIGTERM) == 0
    found = await rows(postgres_url)
    assert Counter(row.status for row in found) == {"finished": 40}
    assert {row.token_id for row in found} == {token["id"]}
    assert {row.num_completion_tokens for row in found} == {min(3, len(HELLO))}


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_the_databases_clock_is_everybodys(accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    async with accounts.database.each() as connection:
        theirs = await connection.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())::float8"))
    assert isinstance(theirs, float)
    monkeypatch.setattr("control_plane.storage.database.time.time", lambda: theirs + 3600)
    await accounts.database.set_clock()
    assert abs(accounts.database.now() - theirs) < 60
