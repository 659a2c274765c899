"""Every view can be used by everybody: axe finds nothing serious in light, dark and at a phone's width.

With TANDEM_SCREENSHOTS=1 the same pages become the pictures of the documentation.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from tests.herd import load_of
from tests.system.fleet import Fleet
from tests.system.streams import MODEL, client
from tests.web.browser import DESKTOP, PHONE, expect, findings, opened, picture
from tests.web.conftest import Large

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.services]

PROMPT = "A KV cache holds the attention keys and values of the tokens computed so far. " * 12


async def playground(page: Page) -> None:
    await page.get_by_role("button", name="What is a KV cache?").click()
    await expect(page.get_by_role("table", name="Until the first token")).to_be_visible()
    await expect(page.get_by_text("Answer complete.")).to_be_attached()


async def schema(page: Page) -> None:
    await page.get_by_role("tab", name="JSON Schema").click()
    await page.get_by_role("button", name="Send").click()
    await expect(page.get_by_label("Answer as JSON")).not_to_be_empty()
    await expect(page.get_by_role("button", name="Send")).to_be_visible()


async def tools(page: Page) -> None:
    await page.get_by_role("tab", name="Tools").click()
    await page.get_by_role("button", name="Send").click()
    await expect(page.get_by_role("button", name=re.compile("^Send"))).not_to_have_count(0)
    await expect(page.get_by_role("button", name="Stop")).to_have_count(0)


async def embeddings(page: Page) -> None:
    await page.get_by_role("tab", name="Embeddings").click()
    await page.get_by_role("button", name="Embed").click()
    await expect(page.get_by_role("table", name="Cosine of each pair")).to_be_visible()


async def fleet(page: Page) -> None:
    await expect(page.get_by_role("button", name="Drain decode-0")).to_be_visible()


async def question(page: Page) -> None:
    await page.get_by_role("button", name="Drain decode-0").click()
    await expect(page.get_by_role("dialog")).to_be_visible()


async def cache(page: Page) -> None:
    await expect(page.locator(".canvas canvas")).to_have_count(2)
    await page.get_by_text("As a table").first.click()


async def requests(page: Page) -> None:
    await expect(page.get_by_role("row").nth(3)).to_be_visible()


async def one_request(page: Page) -> None:
    await page.get_by_role("row").filter(has_text=re.compile("prefill-0 →")).first.get_by_role("link").click()
    await expect(page.get_by_role("heading", name="Why it went there")).to_be_visible()


async def events(page: Page) -> None:
    await expect(page.locator(".events li").nth(3)).to_be_visible()


VIEWS: dict[str, tuple[str, Callable[[Page], Awaitable[None]]]] = {
    "playground": ("playground", playground),
    "schema": ("playground", schema),
    "tools": ("playground", tools),
    "embeddings": ("playground", embeddings),
    "fleet": ("fleet", fleet),
    "drain": ("fleet", question),
    "cache": ("cache", cache),
    "requests": ("requests", requests),
    "request": ("requests", one_request),
    "events": ("events", events),
}
LOOKS: tuple[tuple[Any, int], ...] = (("light", DESKTOP), ("dark", DESKTOP), ("dark", PHONE), ("light", PHONE))
EXAMINED: tuple[tuple[Any, int], ...] = (("light", DESKTOP), ("dark", PHONE))
"""By axe: colours depend on the scheme alone, and what is shown on the width alone."""


async def looked_at(page: Page, name: str) -> list[str]:
    """Return what axe finds in a page that is open, in each scheme and at each width; take its pictures."""
    found: list[str] = []
    for scheme, width in LOOKS:
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        await page.set_viewport_size({"width": width, "height": 844 if width == PHONE else 900})
        await page.evaluate("() => new Promise(requestAnimationFrame)")
        if (scheme, width) in EXAMINED:
            found += [f"{scheme} {width}: {finding}" for finding in await findings(page)]
        overflow = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, f"{overflow} pixels wider than a window of {width}"
        await page.evaluate("scrollTo(0, 0)")
        await picture(page, f"page-{name}-{scheme}" + ("-phone" if width == PHONE else ""))
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def busy_fleet(web_fleet: Fleet) -> Fleet:
    """A fleet that has answered requests, one with a hand-over and one from a cache."""
    async with client(web_fleet.base_url) as http:
        for _ in range(4):
            answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 24})
            assert answer.status_code == 200
    return web_fleet


@pytest.mark.parametrize("name", VIEWS)
async def test_nothing_is_in_the_way_of_anybody(browser: Browser, busy_fleet: Fleet, name: str) -> None:
    path, act = VIEWS[name]
    async with opened(browser, f"{busy_fleet.base_url}/#/{path}") as page:
        await act(page)
        assert await looked_at(page, name) == []


async def test_a_large_fleet_is_in_the_way_of_nobody(browser: Browser, large_fleet: Large) -> None:
    async with opened(browser, f"{large_fleet.url}/#/fleet") as page:
        for place in range(large_fleet.herd.num_workers):
            large_fleet.herd.beat(place, load_of(place, num_running=place % 4, tokens_generated=900.0 * (place % 7)))
        await page.get_by_role("button", name="rack-0", exact=True).click()
        await expect(page.get_by_role("row").filter(has_text="decode-6")).not_to_contain_text("silent")
        assert await looked_at(page, "fleet-200") == []


async def test_axe_finds_what_is_in_somebodys_way(browser: Browser) -> None:
    page = await browser.new_page()
    try:
        await page.set_content('<html lang="en"><title>t</title><main><p style="color: #ccc">pale</p><input></main>')
        assert {found.partition(":")[0] for found in await findings(page)} == {"color-contrast", "label"}
    finally:
        await page.close()


async def test_the_page_without_scripts_is_in_the_way_of_nobody(browser: Browser, large_fleet: Large) -> None:
    context = await browser.new_context(java_script_enabled=False)
    try:
        page = await context.new_page()
        await page.goto(large_fleet.url)
        await expect(page.get_by_role("heading", name="Tandem")).to_be_visible()
        await expect(page.locator("pre")).to_contain_text(f"curl -N {large_fleet.url}/client/v4/")
        await expect(page.get_by_role("link", name="reference")).to_be_visible()
    finally:
        await context.close()
