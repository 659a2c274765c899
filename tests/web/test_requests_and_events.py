"""A reader follows requests as they run, sees why one went where it went, what caches saved, and what happened."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from playwright.async_api import Browser

from tests.system.fleet import Fleet
from tests.system.streams import MODEL, client
from tests.web.browser import expect, opened
from tests.web.conftest import Slow

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.services]

LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 100_000, "stream": True}
LONG_PROMPT = "A KV cache holds the attention keys and values of the tokens computed so far. " * 12


async def ask(http: httpx.AsyncClient, prompt: str) -> str:
    """Answer one completion; return the request's id."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-request-id"])


async def test_a_request_is_in_the_list_while_it_runs_and_after_it(browser: Browser, slow_fleet: Slow) -> None:
    async with opened(browser, f"{slow_fleet.url}/#/requests") as page, client(slow_fleet.url) as http:
        async with http.stream("POST", "/v1/completions", json=LONG) as response:
            short = response.headers["x-request-id"][:8]
            row = page.get_by_role("row").filter(has=page.get_by_role("link", name=short))
            await expect(row).to_contain_text("running")
            await expect(row).to_contain_text("stand-in")
        await expect(row).to_contain_text("cancelled")
        await page.get_by_label("State").select_option("running")
        await expect(row).to_have_count(0)
        await page.get_by_label("State").select_option("all")
        await page.get_by_label("Search").fill(short)
        await expect(page.get_by_role("row")).to_have_count(2)  # with the row of headings


async def test_a_held_list_does_not_move_under_the_readers_eyes(browser: Browser, web_fleet: Fleet) -> None:
    async with opened(browser, f"{web_fleet.base_url}/#/requests") as page, client(web_fleet.base_url) as http:
        first = await ask(http, "one")
        await expect(page.get_by_role("link", name=first[:8])).to_be_visible()
        await page.get_by_label("Hold the list").check()
        second = await ask(http, "two")
        async with opened(browser, f"{web_fleet.base_url}/#/requests") as other:
            await expect(other.get_by_role("link", name=second[:8])).to_be_visible()
        await expect(page.get_by_role("link", name=second[:8])).to_have_count(0)
        await page.get_by_label("Hold the list").uncheck()
        await expect(page.get_by_role("link", name=second[:8])).to_be_visible()


async def test_one_request_shows_its_waterfall_its_candidates_and_what_moved(
    browser: Browser, web_fleet: Fleet
) -> None:
    async with client(web_fleet.base_url) as http:
        request_id = await ask(http, f"{LONG_PROMPT} moved")
        explanation = (await http.get(f"/v1/requests/{request_id}/explain")).json()
    async with opened(browser, f"{web_fleet.base_url}/#/requests/{request_id}") as page:
        segments = page.get_by_role("table", name=re.compile("segments explain"))
        await expect(segments.get_by_role("row")).to_have_count(1 + len(explanation["segments"]))
        times = await segments.get_by_role("cell").filter(has_text=re.compile("ms$")).all_inner_texts()
        shown = sum(float(text.split()[0]) for text in times if text.endswith("ms") and text[0].isdigit())
        assert shown == pytest.approx(explanation["ttft_ms"], rel=0.05, abs=0.5)
        candidates = page.get_by_role("table", name=re.compile("What the router compared"))
        await expect(candidates.get_by_role("row", name=re.compile("prefill-0"))).to_contain_text("chosen")
        await expect(page.get_by_text("reads the prompt")).to_contain_text("prefill-0")
        await expect(page.get_by_role("region", name="Moves").get_by_role("row")).to_have_count(2)
        await expect(page.get_by_role("region", name="Moves")).to_contain_text("Hand-over")
        await page.get_by_role("button", name="Copy").click()
        assert await page.evaluate("navigator.clipboard.readText()") == request_id


async def test_a_request_that_nobody_knows_is_said_to_be_unknown(browser: Browser, web_fleet: Fleet) -> None:
    url = f"{web_fleet.base_url}/#/requests/00000000-none"
    async with opened(browser, url, allowed=["404 (Not Found)"]) as page:
        await expect(page.get_by_role("heading", name="The gateway keeps no explanation")).to_be_visible()
        await page.get_by_role("link", name="All requests").click()
        await expect(page.get_by_role("heading", name="Requests", level=1)).to_be_visible()


async def test_prompts_that_repeat_raise_the_share_of_the_cache_and_the_chart_has_a_table(
    browser: Browser, web_fleet: Fleet
) -> None:
    async with opened(browser, f"{web_fleet.base_url}/#/cache") as page, client(web_fleet.base_url) as http:
        for _ in range(2):
            await ask(http, f"{LONG_PROMPT} cached")
        tokens = page.locator(".stat", has_text=re.compile("Tokens from (pools|stores)")).locator("dd")
        await expect(tokens.filter(has_text=re.compile(r"^[1-9]"))).not_to_have_count(0, timeout=20_000)
        await expect(page.get_by_role("img", name=re.compile("^Pool: .*Cached"))).to_be_visible()
        await page.get_by_text("As a table").first.click()
        table = page.get_by_role("region", name="Share of the prompts that came from caches, as a table")
        await expect(table.get_by_role("row").filter(has_text=re.compile(r"[1-9]\d? %"))).not_to_have_count(0)


async def test_events_are_filtered_by_severity_kind_and_words_and_new_ones_appear(
    browser: Browser, web_fleet: Fleet
) -> None:
    async with opened(browser, f"{web_fleet.base_url}/#/events") as page:
        items = page.locator(".events li")
        await expect(items.filter(has_text="worker joined")).not_to_have_count(0)
        await page.get_by_label("Kind").select_option("worker_joined")
        await page.get_by_label("Search").fill("prefill-0")
        await expect(items).to_have_count(1)
        await page.get_by_label("Severity").select_option("error")
        await page.get_by_role("button", name="Show all events").click()
        extra = web_fleet.start("kv", "kv-late", "--host-id", "host-late")
        await expect(items.filter(has_text="kv-late").first).to_be_visible(timeout=20_000)
        extra.kill()
        await asyncio.to_thread(extra.process.wait)
        del web_fleet.services["kv-late"]
