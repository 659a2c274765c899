"""A worker that ends leaves the page, and its memory with it.

This file is the last one here: it ends a worker of the fleet that all tests of the page share.
"""

from __future__ import annotations

import signal

import pytest
from playwright.async_api import Browser, Page

from tests.system.fleet import Fleet
from tests.web.browser import expect, opened, row

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.services]


async def mebibytes(page: Page, owner: str) -> float:
    """Return what the legend of a host's memory says that an owner has."""
    text = await page.locator(".legend li", has_text=owner).first.locator("b").inner_text()
    number, unit = text.split()
    return float(number) * {"MiB": 1, "GiB": 1024}[unit]


async def test_memory_falls_when_a_worker_ends(browser: Browser, web_fleet: Fleet) -> None:
    ending = web_fleet.services["decode-1"]
    async with opened(browser, f"{web_fleet.base_url}/#/fleet") as page:
        await expect(row(page, "decode-1")).to_contain_text("ready")
        before = await mebibytes(page, "Decode")
        ending.kill(signal.SIGTERM)
        await web_fleet.ended(ending)
        del web_fleet.services["decode-1"]
        await expect(row(page, "decode-1")).to_have_count(0)
        assert await mebibytes(page, "Decode") < before - 50
