"""Explanations are kept in bounds, on both databases, and an account sees its own only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.accounts.service import Accounts
from control_plane.api.http.request_context import HttpSettings
from control_plane.explain import store
from control_plane.explain.explanation import Explanation, Summary
from control_plane.explain.requests import Requests
from control_plane.explain.store import ExplanationStore
from control_plane.storage.tables import explanations
from tandem_runtime.errors import Unavailable
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher
from tests.system.fleet import until

HELLO = [*ids_of("Hello"), 1]
OPERATOR = "an-operators-token"


def explanation(request_id: str, started_ms: int, account: str = "me") -> Explanation:
    return Explanation(Summary(request_id, account, "demo", "chat", "finished", started_ms, 1.0, 2.0))


async def kept(accounts: Accounts) -> list[str]:
    def read(connection: sa.Connection) -> list[str]:
        query = sa.select(explanations.c.request_id).order_by(explanations.c.created_ms)
        return list(connection.execute(query).scalars())

    return await accounts.database.run(read, single=True)


async def test_what_is_too_old_goes_and_what_is_young_stays(accounts: Accounts) -> None:
    keeper = ExplanationStore(accounts.database, hours=2, max_rows=100)
    now_ms = accounts.database.now_ms()
    for age_hours in (5, 3, 1.9, 0):
        keeper.add(explanation(f"{age_hours:g} hours", now_ms - int(age_hours * 3_600_000)))
    await keeper.drain()
    assert len(await kept(accounts)) == 4
    await keeper.clean()
    assert await kept(accounts) == ["1.9 hours", "0 hours"]


async def test_the_table_keeps_the_newest_up_to_its_bound_without_waiting_for_the_clean_up(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MAX_REMOVED", 7)
    keeper = ExplanationStore(accounts.database, hours=1, max_rows=20)
    now_ms = accounts.database.now_ms()
    for number in range(75):
        keeper.add(explanation(f"{number:02}", now_ms + number))
    await keeper.drain()
    assert await kept(accounts) == [f"{number:02}" for number in range(55, 75)]


async def test_an_id_that_comes_twice_is_kept_once(accounts: Accounts) -> None:
    keeper = ExplanationStore(accounts.database, hours=1, max_rows=20)
    for _ in range(2):
        keeper.add(explanation("same", accounts.database.now_ms()))
        keeper.add(explanation("other", accounts.database.now_ms()))
        await keeper.drain()
    assert sorted(await kept(accounts)) == ["other", "same"]


async def test_while_the_database_is_away_a_bounded_number_waits_and_the_newest_are_written(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MAX_PENDING", 5)
    monkeypatch.setattr(store, "_RETRY_SECONDS", 0.01)
    keeper, is_away = ExplanationStore(accounts.database, hours=1, max_rows=20), True
    run = accounts.database.run

    async def run_if_there(work: Callable[[sa.Connection], Any], **options: Any) -> Any:
        if is_away:
            raise Unavailable("away")
        return await run(work, **options)

    monkeypatch.setattr(accounts.database, "run", run_if_there)
    for number in range(30):
        keeper.add(explanation(f"{number:02}", accounts.database.now_ms() + number))
    assert len(keeper._pending) == 5
    await asyncio.sleep(0)
    is_away = False
    await keeper.drain()
    assert await kept(accounts) == [f"{number:02}" for number in range(25, 30)]


@dataclass
class World:
    gateway: Gateway
    secrets: dict[str, str]
    mine: str = ""
    yours: str = ""

    async def ask(self, who: str, path: str) -> Any:
        headers = {"authorization": f"Bearer {self.secrets[who]}"} if who else {}
        answer = await self.gateway.client.get(path, headers=headers)
        return answer.status_code, answer.json()

    async def chat(self, who: str) -> str:
        headers = {"authorization": f"Bearer {self.secrets[who]}"}
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        answer = await self.gateway.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return str(answer.headers["x-request-id"])


@asynccontextmanager
async def world(accounts: Accounts, *, has_memory: bool) -> AsyncIterator[World]:
    """A gateway with the accounts chief, me and you; with or without the latest requests in memory."""
    secrets = {"operator": OPERATOR}
    for name, scope in (("chief", "admin"), ("me", "inference"), ("you", "inference")):
        await accounts.store.create(name)
        _, secrets[name] = await accounts.store.create_token(name, "first", [scope])
    accounts.authenticator.forget()
    keeper, requests = ExplanationStore(accounts.database, hours=1, max_rows=100), Requests("gateway-1")
    requests.keep_in(keeper)
    dispatcher = ScriptedDispatcher(Script(HELLO))
    settings = HttpSettings(operator_token=OPERATOR)
    async with serve(
        dispatcher, settings=settings, accounts=accounts, requests=requests, explanations=keeper
    ) as gateway:
        here = World(gateway, secrets)
        here.mine, here.yours = await here.chat("me"), await here.chat("you")
        await until(lambda: requests.num_running == 0, 10)
        await keeper.drain()
        if not has_memory:
            requests._latest.clear()
        yield here


@pytest.mark.parametrize("has_memory", [True, False])
async def test_an_account_sees_its_own_requests_and_others_ids_are_unknown_to_it(
    accounts: Accounts, has_memory: bool
) -> None:
    async with world(accounts, has_memory=has_memory) as here:
        mine, yours = here.mine, here.yours
        status, found = await here.ask("me", f"/v1/requests/{mine}/explain")
        assert status == 200 and (found["id"], found["account"], found["state"]) == (mine, "me", "finished")
        assert found["usage"]["completion_tokens"] == len(HELLO) and found["texts"] is None
        refused = [await here.ask("me", f"/v1/requests/{request_id}/explain") for request_id in (yours, "no-such-id")]
        assert [status for status, _ in refused] == [404, 404]
        messages = [answer["error"]["message"] for _, answer in refused]
        assert messages[0].replace(yours, "X") == messages[1].replace("no-such-id", "X"), "nothing tells them apart"
        assert await listed(here, "me") == [mine]
        assert await listed(here, "me", "?account=you") == []
        for who in ("chief", "operator"):
            assert set(await listed(here, who)) == {mine, yours}
            assert await listed(here, who, "?account=you") == [yours]
            assert (await here.ask(who, f"/v1/requests/{yours}/explain"))[0] == 200
        assert (await here.ask("", "/v1/requests"))[0] == 401
        assert (await here.ask("", f"/v1/requests/{mine}/explain"))[0] == 401


async def listed(here: World, who: str, query: str = "") -> list[str]:
    status, answer = await here.ask(who, f"/v1/requests{query}")
    assert status == 200 and answer["object"] == "list"
    return [row["id"] for row in answer["data"]]


@pytest.mark.parametrize("has_memory", [True, False])
async def test_the_list_is_filtered_and_bounded(accounts: Accounts, has_memory: bool) -> None:
    async with world(accounts, has_memory=has_memory) as here:
        assert len(await listed(here, "chief", "?limit=1")) == 1
        assert len(await listed(here, "chief", "?model=@tandem%2Fdemo&state=finished")) == 2
        assert await listed(here, "chief", "?model=another") == []
        assert await listed(here, "chief", "?state=failed") == []
        for query in ("limit=0", "limit=501", "limit=x", "state=lost"):
            assert (await here.ask("chief", f"/v1/requests?{query}"))[0] == 400
