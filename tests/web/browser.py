"""A page of the gateway in headless Chromium, and what must not go wrong in it."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, ConsoleMessage, Locator, Page, Request
from playwright.async_api import expect as playwright_expect

FOLDER = Path(__file__).parent
IMAGES = FOLDER.parents[1] / "docs" / "images"
AXE = FOLDER / "node_modules" / "axe-core" / "axe.min.js"
DESKTOP, PHONE = 1280, 390
SCHEMES = ("light", "dark")
_MAX_IMAGE_BYTES = 300_000
PICTURES = {
    *(f"page-{view}-{scheme}" for view in ("playground", "fleet", "cache", "request", "events") for scheme in SCHEMES),
    "page-fleet-200-light",
    "page-tools-light",
    "page-playground-light-phone",
    "page-fleet-dark-phone",
}
"""Those that are kept in docs/images."""
_CHROMIUM = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The best first: without windows it takes a third of the processor time."""
_OFTEN_SECONDS = 2.0
_ATTEMPT_MILLISECONDS = 150.0
_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def chromium() -> str:
    """Return Chromium's path. Skip the test if `make services` has not installed it; fail if skips are not allowed."""
    found = [path for name in _CHROMIUM if (path := shutil.which(name))]
    if found and AXE.exists():
        return found[0]
    reason = "Chromium or tests/web/node_modules is missing; run `make services`"
    if os.environ.get("TANDEM_REQUIRE_SERVICES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass
class Watch:
    """What a page did that it must not do."""

    origin: str
    problems: list[str] = field(default_factory=list)
    """Errors on the console, and of scripts."""
    foreign: list[str] = field(default_factory=list)
    """Requests to anything but the gateway."""

    def console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.text} {message.location}")

    def request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if f"{parts.scheme}://{parts.netloc}" != self.origin and parts.scheme != "data":
            self.foreign.append(request.url)


class _Often:
    """Playwright's assertions about a part of a page, looked at more often at first than Playwright does.

    It waits 0.1, 0.25, 0.5 and then 1 s between looks. Here two looks lie 0.15 s apart at most, for two seconds.
    """

    def __init__(self, actual: Locator) -> None:
        self._assertions = playwright_expect(actual)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        check = getattr(self._assertions, name)

        async def often(*args: Any, timeout: float = 5_000.0, **options: Any) -> None:
            now = time.monotonic()
            often_until, until = now + _OFTEN_SECONDS, now + timeout / 1000
            while (now := time.monotonic()) < min(often_until, until):
                try:
                    return await check(*args, timeout=_ATTEMPT_MILLISECONDS, **options)  # type: ignore[no-any-return]
                except AssertionError:
                    continue
            return await check(*args, timeout=max(1.0, 1000 * (until - now)), **options)  # type: ignore[no-any-return]

        return often


def expect(actual: Locator) -> _Often:
    """Return Playwright's assertions about a part of a page; they wait for it to become so, for 5 s at most."""
    return _Often(actual)


@asynccontextmanager
async def opened(
    browser: Browser, url: str, *, scheme: Any = "light", width: int = DESKTOP, allowed: Sequence[str] = ()
) -> AsyncIterator[Page]:
    """Open a page; after the block, fail for an error on its console or a request to another host.

    `allowed`: parts of console messages that belong to the test, such as a status that Chromium reports by itself.
    """
    context = await browser.new_context(
        color_scheme=scheme,
        viewport={"width": width, "height": 844 if width == PHONE else 900},
        reduced_motion="reduce",
        permissions=["clipboard-read", "clipboard-write"],
    )
    parts = urlsplit(url)
    watch = Watch(f"{parts.scheme}://{parts.netloc}")
    try:
        page = await context.new_page()
        page.on("console", watch.console)
        page.on("pageerror", lambda error: watch.problems.append(str(error)))
        page.on("request", watch.request)
        await page.goto(url)
        yield page
        assert [text for text in watch.problems if not any(part in text for part in allowed)] == []
        assert watch.foreign == []
    finally:
        await context.close()


def row(page: Page, name: str) -> Locator:
    """Return a worker's row in the table of its host."""
    return page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=re.compile(rf"^{name}\b")))


async def findings(page: Page) -> list[str]:
    """Return what axe finds that is serious or critical."""
    if not await page.evaluate("() => 'axe' in window"):
        await page.evaluate(AXE.read_text())
    options = {"runOnly": {"type": "tag", "values": _RULES}, "resultTypes": ["violations"]}
    result: Any = await page.evaluate("(options) => axe.run(document, options)", options)
    return [
        f"{violation['id']}: {node['html'][:200]} {node['failureSummary']}"
        for violation in result["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


async def picture(page: Page, name: str) -> None:
    """Write a picture of the documentation, if TANDEM_SCREENSHOTS=1; fail if it is too large to keep."""
    if os.environ.get("TANDEM_SCREENSHOTS") != "1" or name not in PICTURES:
        return
    IMAGES.mkdir(exist_ok=True)
    path = IMAGES / f"{name}.png"
    await page.screenshot(path=path)
    assert path.stat().st_size < _MAX_IMAGE_BYTES, f"{path} has {path.stat().st_size:,} bytes"
