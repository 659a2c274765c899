"""With accounts, the page asks for a token, says what each kind opens, and keeps it in this tab only."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from control_plane.accounts.store import AccountStore
from control_plane.accounts.tokens import Scope
from control_plane.storage.database import Database, database_url
from tests.system.fleet import until
from tests.system.streams import MODEL, client
from tests.web.browser import expect, opened
from tests.web.conftest import PageFleet, stand_in

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.services]

OPERATOR = "the-operators-own-token"
REFUSED = ["401 (Unauthorized)", "403 (Forbidden)"]
"""Chromium writes a refusal to the console by itself: the page has to ask to know."""
QUESTION = "What is a KV cache?"


@dataclass
class Guarded:
    url: str
    admin: str
    mine: str
    others: str
    """Tokens: of an administrator, and of two accounts for inference."""

    async def ask(self, token: str) -> str:
        """Answer a completion; return the request's id."""
        async with client(self.url) as http:
            body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
            headers = {"authorization": f"Bearer {token}"}
            answer = await http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return str(answer.headers["x-request-id"])


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def guarded(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> AsyncIterator[Guarded]:
    """A gateway with accounts and a worker whose answers are made of stand-in words."""
    folder = tmp_path_factory.mktemp("guarded")
    async with PageFleet(folder, operator_token=OPERATOR) as fleet, stand_in(fleet, 0.0):
        secrets = await _accounts(folder)
        async with client(fleet.base_url) as http:

            async def needs_a_token() -> bool:
                return (await http.get("/v1/models")).status_code == 401

            await until(needs_a_token, 30)
        yield Guarded(fleet.base_url, *secrets)


async def _accounts(folder: Path) -> list[str]:
    """Create accounts as the command does; return a token of each."""
    database = Database(database_url("", folder / "state"))
    scopes: dict[str, list[Scope]] = {"chief": ["admin"], "me": ["inference"], "them": ["inference"]}
    try:
        store = AccountStore(database)
        secrets = []
        for name, wanted in scopes.items():
            await store.create(name)
            secrets.append((await store.create_token(name, "first", wanted))[1])
        return secrets
    finally:
        await database.close()


async def use(page: Page, token: str) -> None:
    await page.get_by_label("Token", exact=True).fill(token)
    await page.get_by_role("button", name="Use token").click()


async def test_the_page_asks_for_a_token_and_says_when_it_is_not_known(browser: Browser, guarded: Guarded) -> None:
    async with opened(browser, guarded.url, allowed=REFUSED) as page:
        await expect(page.get_by_role("heading", name="This gateway has accounts")).to_be_visible()
        await use(page, "tdm_wrong")
        await expect(page.get_by_role("heading", name="The gateway does not know this token")).to_be_visible()
        await page.get_by_role("link", name="Fleet").click()
        await expect(page.get_by_role("heading", name="A token is needed")).to_be_visible()


async def test_a_token_for_inference_opens_the_playground_and_the_accounts_own_requests(
    browser: Browser, guarded: Guarded
) -> None:
    own, foreign = await guarded.ask(guarded.mine), await guarded.ask(guarded.others)
    async with opened(browser, guarded.url, allowed=REFUSED) as page:
        await use(page, guarded.mine)
        await page.get_by_role("button", name=QUESTION).click()
        await expect(page.get_by_role("article", name="Answer")).not_to_be_empty()
        await expect(page.get_by_role("table", name="Until the first token")).to_be_visible()
        code = await page.get_by_label("Code", exact=True).last.inner_text()
        assert "$TANDEM_TOKEN" in code and guarded.mine not in await page.content()
        await page.get_by_role("link", name="Requests").click()
        await expect(page.get_by_role("link", name=own[:8])).to_be_visible()
        await expect(page.get_by_role("link", name=foreign[:8])).to_have_count(0)
        for view, words in (("Fleet", "the fleet"), ("Cache", "the cache"), ("Events", "events")):
            await page.get_by_role("link", name=view).click()
            await expect(page.get_by_role("heading", name=f"Only operators see {words}")).to_be_visible()


async def test_an_administrator_sees_all_and_a_forgotten_token_is_gone(browser: Browser, guarded: Guarded) -> None:
    theirs = await guarded.ask(guarded.others)
    async with opened(browser, f"{guarded.url}/#/requests", allowed=REFUSED) as page:
        await use(page, guarded.admin)
        await expect(page.get_by_role("link", name=theirs[:8])).to_be_visible()
        await expect(page.get_by_role("row").filter(has_text="them").first).to_be_visible()
        stored = await page.evaluate("[localStorage.length, Object.values(sessionStorage).join()]")
        assert stored == [0, guarded.admin]
        await page.get_by_role("button", name="Forget token").click()
        await expect(page.get_by_role("heading", name="This gateway has accounts")).to_be_visible()
        await expect(page.get_by_role("link", name=theirs[:8])).to_have_count(0)
        assert await page.evaluate("sessionStorage.length") == 0


async def test_the_operators_token_watches_and_does_not_run_models(browser: Browser, guarded: Guarded) -> None:
    async with opened(browser, f"{guarded.url}/#/fleet", allowed=REFUSED) as page:
        await use(page, OPERATOR)
        await expect(page.get_by_role("rowheader", name=re.compile("stand-in"))).to_be_visible()
        await page.get_by_role("link", name="Playground", exact=True).click()
        await expect(page.get_by_role("heading", name="This token cannot run models")).to_be_visible()
