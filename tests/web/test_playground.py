"""A reader asks, stops, changes the model, reads where the time went, and takes the code along."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Request

from tests.system.fleet import Fleet, until
from tests.system.streams import MODEL
from tests.web.browser import expect, opened
from tests.web.conftest import OTHER_MODEL, Slow

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.services]

QUESTION = "What is a KV cache?"
TABS = ["Chat", "Completion", "JSON Schema", "Tools", "Embeddings"]
LISTEN = """() => {
  window.heard = [];
  const region = document.getElementById("announcements");
  const changes = {childList: true, subtree: true, characterData: true};
  new MutationObserver(() => heard.push(region.textContent)).observe(region, changes);
}"""
SMALL_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


async def set_settings(page: Page, num_tokens: int, temperature: float = 0.0) -> None:
    await page.get_by_text("Settings").click()
    await page.get_by_label("Most tokens of the answer").fill(str(num_tokens))
    await page.get_by_label("Temperature").fill(str(temperature))
    await page.get_by_label("Temperature").blur()


def body_of(request: Request) -> dict[str, Any]:
    body: Any = request.post_data_json
    assert isinstance(body, dict)
    return body


def facts(name: str) -> str:
    return f".stat:has(dt:text-is('{name}')) dd"


async def test_an_answer_comes_with_its_rate_and_the_phases_until_its_first_token(
    browser: Browser, web_fleet: Fleet
) -> None:
    async with opened(browser, web_fleet.base_url) as page:
        await page.get_by_role("button", name=QUESTION).click()
        answer = page.get_by_role("article", name="Answer")
        await expect(answer).to_contain_text("keys and values")
        waterfall = page.get_by_role("table", name="Until the first token")
        await expect(waterfall.get_by_role("row")).not_to_have_count(0)
        names = await waterfall.get_by_role("rowheader").all_inner_texts()
        assert {"Tokenize", "Route", "Prefill", "Detokenize"} <= set(names) and "Not explained" not in names
        for name in ("First token", "Tokens a second", "Prompt", "Answer"):
            await expect(page.locator(facts(name))).to_have_text(re.compile(r"^[\d.,]+ ?\w*"))
        await page.get_by_role("link", name="Why it went where it went").click()
        await expect(page.get_by_role("heading", name="Why it went there")).to_be_visible()


async def test_an_answer_is_stopped_and_nothing_goes_on(browser: Browser, slow_fleet: Slow) -> None:
    async with opened(browser, slow_fleet.url) as page:
        await page.get_by_role("tab", name="Completion").click()
        await set_settings(page, 100_000)
        await page.get_by_role("button", name="Continue").click()
        await expect(page.get_by_role("region", name="Answer", exact=True)).to_contain_text(re.compile(r"(\w+ ){20}"))
        assert slow_fleet.worker.load().num_running == 1
        await page.get_by_role("button", name="Stop").click()
        await expect(page.get_by_text("Stopped.", exact=True)).to_be_visible()
        await expect(page.get_by_role("button", name="Continue")).to_be_enabled()
        await until(lambda: slow_fleet.worker.load().num_running == 0, 10)


async def test_another_model_answers_after_the_reader_changed_it(browser: Browser, web_fleet: Fleet) -> None:
    async with opened(browser, web_fleet.base_url) as page:
        await expect(page.get_by_role("combobox", name="Model").locator("option")).to_have_text([MODEL, OTHER_MODEL])
        await page.get_by_role("combobox", name="Model").select_option(OTHER_MODEL)
        await page.get_by_role("tab", name="Completion").click()
        await set_settings(page, 8)
        async with page.expect_request("**/v1/completions") as sent:
            await page.get_by_role("button", name="Continue").click()
        assert body_of(await sent.value)["model"] == OTHER_MODEL
        await page.get_by_role("link", name="Why it went where it went").click()
        await expect(page.locator("dt:text-is('Model') + dd")).to_have_text(OTHER_MODEL)


async def test_a_conversation_goes_on_and_a_new_one_forgets_it(browser: Browser, web_fleet: Fleet) -> None:
    async with opened(browser, web_fleet.base_url) as page:
        await page.get_by_role("button", name=QUESTION).click()
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        await page.get_by_label("Message", exact=True).fill("And why?")
        async with page.expect_request("**/v1/chat/completions") as sent:
            await page.get_by_label("Message", exact=True).press("Enter")
        roles = [message["role"] for message in body_of(await sent.value)["messages"]]
        assert roles == ["user", "assistant", "user"]
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        await page.get_by_role("link", name="Fleet").click()
        await page.get_by_role("link", name="Playground", exact=True).click()
        await expect(page.get_by_role("article")).to_have_count(4)
        await page.get_by_role("button", name="New chat").click()
        await expect(page.get_by_role("article")).to_have_count(0)
        assert await page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0], "in memory only"


async def test_an_answer_has_the_form_of_its_schema_and_a_schema_that_is_none_is_not_sent(
    browser: Browser, web_fleet: Fleet
) -> None:
    async with opened(browser, web_fleet.base_url) as page:
        await page.get_by_role("tab", name="JSON Schema").click()
        schema = page.get_by_label("JSON Schema of the answer")
        await schema.fill("{")
        await expect(page.get_by_text("This is not JSON")).to_be_visible()
        await expect(page.get_by_role("button", name="Send")).to_be_disabled()
        await schema.fill(json.dumps(SMALL_SCHEMA))
        await page.get_by_role("button", name="Send").click()
        answer = page.get_by_label("Answer as JSON")
        await expect(answer).to_have_text(re.compile(r'^\{\s+"ok": (true|false)\s+\}$'))


async def test_a_model_calls_a_tool_and_goes_on_with_its_result(browser: Browser, web_fleet: Fleet) -> None:
    async with opened(browser, web_fleet.base_url) as page:
        await page.get_by_role("tab", name="Tools").click()
        await set_settings(page, 128)
        await page.get_by_role("button", name="Send").click()
        call = page.locator(".call")
        await expect(call).to_contain_text("get_weather")
        await expect(call.locator("code")).to_have_text('{"city": "Oslo"}')
        async with page.expect_request("**/v1/chat/completions") as sent:
            await page.get_by_role("button", name="Send the result").click()
        messages = body_of(await sent.value)["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
        assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
        await expect(page.get_by_role("region", name="Answer", exact=True).locator(".running")).not_to_be_empty()


async def test_texts_become_vectors_and_what_is_alike_lies_closer(browser: Browser, web_fleet: Fleet) -> None:
    async with opened(browser, web_fleet.base_url) as page:
        await page.get_by_role("tab", name="Embeddings").click()
        await page.get_by_role("button", name="Embed").click()
        table = page.get_by_role("table", name="Cosine of each pair")
        await expect(table.get_by_role("cell")).to_have_count(9)
        rows = [float(text) for text in await table.get_by_role("cell").all_inner_texts()]
        assert [rows[0], rows[4], rows[8]] == [1.0, 1.0, 1.0]
        assert rows[1] > rows[2], "the cat is closer to the kitten than to the interest rates"


async def test_a_refusal_is_shown_with_the_gateways_own_sentence(browser: Browser, web_fleet: Fleet) -> None:
    async with opened(browser, web_fleet.base_url, allowed=["400 (Bad Request)"]) as page:
        await page.get_by_role("tab", name="JSON Schema").click()
        await page.get_by_label("JSON Schema of the answer").fill('{"type": "nonsense"}')
        await page.get_by_role("button", name="Send").click()
        await expect(page.get_by_role("alert")).to_contain_text("nonsense")


async def copied(page: Page, language: str) -> str:
    await page.get_by_role("tab", name=language).click()
    await page.get_by_role("button", name="Copy").click()
    await expect(page.get_by_text("Copied")).to_be_visible()
    return str(await page.evaluate("navigator.clipboard.readText()"))


async def output_of(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    return output.decode()


async def test_the_code_that_is_copied_gives_the_same_answer(browser: Browser, web_fleet: Fleet) -> None:
    async with opened(browser, web_fleet.base_url) as page:
        await set_settings(page, 64)
        await page.get_by_role("button", name=QUESTION).click()
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        answer = await page.get_by_role("article", name="Answer").inner_text()
        curl, python = await copied(page, "curl"), await copied(page, "Python")
        javascript, worker = await copied(page, "JavaScript"), await copied(page, "Worker")
    events = (await output_of("bash", "-c", curl.replace("curl", "curl --silent", 1))).split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == answer
    assert await output_of(sys.executable, "-c", python) == answer
    assert 'from "openai"' in javascript and QUESTION in javascript
    assert f'env.AI.run("{MODEL}", {{' in worker and QUESTION in worker and '"model"' not in worker


async def test_tabs_are_changed_with_arrow_keys_and_the_first_key_skips_to_the_content(
    browser: Browser, web_fleet: Fleet
) -> None:
    async with opened(browser, web_fleet.base_url) as page:
        await page.get_by_role("tab", name="Chat").wait_for()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("main")).to_be_focused()
        await page.get_by_role("tab", name="Chat").focus()
        chosen = page.get_by_label("Kind of request").get_by_role("tab", selected=True)
        for key, name in (("ArrowRight", "Completion"), ("ArrowLeft", "Chat"), ("ArrowLeft", "Embeddings")):
            await page.keyboard.press(key)
            await expect(chosen).to_have_text(name)
            await expect(chosen).to_be_focused()
        await page.keyboard.press("Home")
        await expect(chosen).to_have_text("Chat")
        assert await page.get_by_label("Kind of request").get_by_role("tab").all_inner_texts() == TABS


async def test_a_screen_reader_hears_of_an_answer_twice_however_many_tokens_it_has(
    browser: Browser, web_fleet: Fleet
) -> None:
    async with opened(browser, web_fleet.base_url) as page:
        await page.evaluate(LISTEN)
        await page.get_by_role("button", name=QUESTION).click()
        await expect(page.locator("#announcements")).to_have_text(re.compile("^Answer complete."))
        heard = await page.evaluate("heard")
    assert heard[0] == "Answering." and len(heard) == 2 and "keys and values" in heard[1]
