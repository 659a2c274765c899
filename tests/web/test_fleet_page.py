"""An operator sees hosts, workers and memory by owner as they change, and drains a worker, in a fleet of any size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import Browser

from tandem.v1 import types_pb2 as pb
from tests.herd import GIB, load_of
from tests.system.fleet import Fleet
from tests.web.browser import expect, opened, row
from tests.web.conftest import OTHER_MODEL, Large, large

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.services]


async def test_two_hundred_workers_are_folded_by_host_and_found_by_a_search(
    browser: Browser, large_fleet: Large
) -> None:
    async with opened(browser, f"{large_fleet.url}/#/fleet") as page:
        await expect(page.locator(".stat", has_text="Workers ready")).to_contain_text("200 of 200")
        await expect(page.locator("section.host")).to_have_count(25)
        await expect(page.get_by_role("row")).to_have_count(0)
        folded = page.get_by_role("img", name="Memory of all devices: Tandem 420 GiB, Others 28.0 GiB, Free 112 GiB")
        await expect(folded).to_have_count(25)
        await page.get_by_role("button", name="rack-3", exact=True).click()
        await expect(page.get_by_role("button", name=re.compile("^Drain "))).to_have_count(7)
        await page.get_by_label("Search").fill("decode-117")
        await expect(page.locator("section.host")).to_have_count(1)
        await expect(row(page, "decode-117")).to_be_visible()
        await page.get_by_label("Search").fill("no such worker")
        await page.get_by_role("button", name="Show all workers").click()
        await expect(page.locator("section.host")).to_have_count(25)


async def test_what_changes_in_a_large_fleet_is_seen_at_once(browser: Browser, large_fleet: Large) -> None:
    async with opened(browser, f"{large_fleet.url}/#/fleet") as page:
        device = page.get_by_role("img", name=re.compile("Memory of device 5:"))
        await page.get_by_label("Search").fill("decode-117")
        await expect(device).to_have_attribute(
            "aria-label", re.compile("Tandem 60.0 GiB, Others 4.0 GiB, Free 16.0 GiB")
        )
        state = pb.WORKER_STATE_DRAINING
        large_fleet.herd.beat(117, load_of(117, state=state, own_bytes=20 * GIB, num_running=5))
        await expect(row(page, "decode-117")).to_contain_text("draining")
        await expect(device).to_have_attribute(
            "aria-label", re.compile("Tandem 20.0 GiB, Others 4.0 GiB, Free 56.0 GiB")
        )
        large_fleet.herd.beat(117, _with_unknown_owners(load_of(117, own_bytes=20 * GIB, state=state)))
        await expect(device).to_have_attribute("aria-label", re.compile(": Unknown owner 24.0 GiB, Free 56.0 GiB$"))
        await expect(page.locator(".device", has_text="a worker loads")).to_contain_text("load unknown")
        await expect(page.locator(".device", has_text="a worker loads")).not_to_contain_text(" W")
        await page.get_by_label("Search").fill("")
        await page.get_by_label("State").select_option("draining")
        await expect(page.locator(".filters .end")).to_have_text("1 of 200 workers")
        large_fleet.herd.beat(117, load_of(117))
        await expect(page.get_by_text("No worker matches")).to_be_visible()


async def test_a_thousand_workers_are_shown_in_slices(browser: Browser, tmp_path: Path) -> None:
    async with large(tmp_path, 1000) as fleet, opened(browser, f"{fleet.url}/#/fleet") as page:
        await expect(page.locator(".stat", has_text="Workers ready")).to_contain_text("1,000 of 1,000")
        await expect(page.locator("section.host")).to_have_count(40)
        await page.get_by_role("button", name=re.compile("Show 40 more of 125 hosts")).click()
        await expect(page.locator("section.host")).to_have_count(80)
        await page.get_by_label("Search").fill("decode-777")
        await expect(row(page, "decode-777")).to_be_visible()


async def test_a_lost_gateway_is_said_and_found_again(browser: Browser, tmp_path: Path) -> None:
    async with Fleet(tmp_path) as fleet:
        allowed = ["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET"]
        async with opened(browser, f"{fleet.base_url}/#/fleet", allowed=allowed) as page:
            await expect(page.locator("header")).to_contain_text("live")
            await fleet.drain_gateway()
            await expect(page.locator("header")).to_contain_text("reconnecting")
            await expect(page.get_by_text("What you see is the last known state.")).to_be_visible()


async def test_every_worker_is_there_with_its_state_its_model_and_the_memory_of_its_host(
    browser: Browser, web_fleet: Fleet
) -> None:
    async with opened(browser, f"{web_fleet.base_url}/#/fleet") as page:
        for name, model in (("prefill-0", "@tandem/demo"), ("decode-1", OTHER_MODEL), ("kv-0", "")):
            await expect(row(page, name)).to_contain_text("ready")
            await expect(row(page, name)).to_contain_text(model)
        bar = page.get_by_role("img", name=re.compile("^Memory of the host: Prefill .* Decode .* Encode .* Free "))
        await expect(bar).to_be_visible()
        await expect(page.locator(".stat", has_text="Workers ready")).to_contain_text("5 of 5")


async def test_a_worker_drains_after_a_question_and_is_taken_back(browser: Browser, web_fleet: Fleet) -> None:
    async with opened(browser, f"{web_fleet.base_url}/#/fleet") as page:
        await page.get_by_role("button", name="Drain decode-1").click()
        dialog = page.get_by_role("dialog", name="Drain decode-1?")
        await expect(dialog).to_contain_text(f"No other decode worker of {OTHER_MODEL} is ready.")
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
        await expect(row(page, "decode-1")).to_contain_text("ready")
        await page.get_by_role("button", name="Drain decode-1").click()
        await dialog.get_by_role("button", name="Drain").click()
        await expect(row(page, "decode-1")).to_contain_text("draining")
        await page.get_by_role("button", name="Resume decode-1").click()
        await page.get_by_role("dialog").get_by_role("button", name="Resume").click()
        await expect(row(page, "decode-1")).to_contain_text("ready")
        await page.get_by_role("link", name="Events").click()
        await expect(page.locator(".events li", has_text="worker draining").first).to_be_visible()


def _with_unknown_owners(load: pb.LoadReport) -> pb.LoadReport:
    """Return the report of a worker whose NVML gives no more than the device's memory."""
    (device,) = load.memory.devices
    for name in ("own_bytes", "foreign_bytes", "utilization_percent", "power_milliwatts"):
        device.ClearField(name)
    device.foreign_unknown = "a worker loads"
    return load
