"""Clients of Node.js programs and Cloudflare Workers work: streamed and not, and with errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.clients.node import bundled_worker, output_of, url_in, wrangler_dev
from tests.examples.workerd import example_worker
from tests.system.fleet import Fleet, until
from tests.system.streams import MODEL

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.services]

REPORT = "It is 12 degrees and sunny in Oslo."


async def test_openai_for_node_streams_what_it_answers_whole_and_gets_its_errors(demo_fleet: Fleet) -> None:
    said: Any = await asyncio.to_thread(output_of, "openai.mjs", f"{demo_fleet.base_url}/v1", MODEL)
    choice = said["whole"]["choices"][0]
    assert said["streamed"] == choice["message"]["content"] != ""
    assert said["finish"] == choice["finish_reason"]
    assert said["usage"]["completion_tokens"] == said["whole"]["usage"]["completion_tokens"]
    assert len(said["plain"]["choices"][0]["logprobs"]["tokens"]) == said["plain"]["usage"]["completion_tokens"]
    assert said["models"] == [MODEL]
    assert [(error["kind"], error["status"]) for error in said["errors"]] == [
        ("NotFoundError", 404),
        ("BadRequestError", 400),
        ("BadRequestError", 400),
    ]
    words = [error["message"] for error in said["errors"]]
    assert "no-such-model" in words[0] and "temperature" in words[1] and "tools[0].name is missing" in words[2]
    await demo_fleet.pools_are_full()


async def test_openai_for_node_works_at_cloudflares_address_too(demo_fleet: Fleet) -> None:
    base_url = f"{demo_fleet.base_url}/client/v4/accounts/acc/ai/v1"
    said: Any = await asyncio.to_thread(output_of, "openai.mjs", base_url, MODEL)
    assert said["streamed"] == said["whole"]["choices"][0]["message"]["content"]
    assert [error["status"] for error in said["errors"]] == [400, 400, 400]


async def test_cloudflare_for_node_runs_streams_and_lists(demo_fleet: Fleet) -> None:
    said: Any = await asyncio.to_thread(output_of, "cloudflare.mjs", f"{demo_fleet.base_url}/client/v4", MODEL)
    events = [line.removeprefix("data: ") for line in said["lines"]]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["response"] for event in events[:-1]) == said["whole"]["response"] != ""
    assert said["models"] == [MODEL] and "prompt" in said["input"]
    assert said["errors"] == [
        {"kind": "BadRequestError", "status": 400, "code": 5007},
        {"kind": "BadRequestError", "status": 400, "code": 5006},
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def libraries(demo_fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """A Worker in stock workerd that asks by way of other people's libraries."""
    folder: Path = bundled_worker(tmp_path_factory.mktemp("worker"))
    with example_worker(demo_fleet.gateway.http_address, folder) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            yield http


async def test_the_ai_sdk_in_a_worker_streams_what_it_generates(libraries: httpx.AsyncClient) -> None:
    whole = (await libraries.get("/generate")).json()
    streamed = (await libraries.get("/stream", params={"affinity": "ses_7"})).json()
    assert whole["text"] == streamed["text"] != "", (whole, streamed)
    assert whole["finishReason"] == streamed["finishReason"] and whole["requestId"]
    for name in ("inputTokens", "outputTokens"):
        assert whole["usage"][name] == streamed["usage"][name] > 0


@pytest.mark.parametrize("route", ["/generate", "/stream"])
async def test_the_ai_sdk_in_a_worker_gets_the_errors(libraries: httpx.AsyncClient, route: str) -> None:
    unknown = (await libraries.get(route, params={"model": "@cf/none/such"})).json()
    assert "5007" in unknown["message"] and "@cf/none/such" in unknown["message"], unknown
    hot = (await libraries.get(route, params={"temperature": 9})).json()
    assert "5006" in hot["message"] and "temperature" in hot["message"], hot


async def test_openai_for_node_calls_tools_streamed_and_in_its_own_loop(demo_fleet: Fleet) -> None:
    said: Any = await asyncio.to_thread(output_of, "openai_tools.mjs", f"{demo_fleet.base_url}/v1", MODEL)
    whole, streamed = (said[name]["message"]["tool_calls"][0]["function"] for name in ("whole", "streamed"))
    assert whole == streamed and whole["name"] == "get_weather" and json.loads(whole["arguments"]) == {"city": "Oslo"}
    assert said["whole"]["finish_reason"] == said["streamed"]["finish_reason"] == "tool_calls"
    assert len(said["deltas"]) > 3 and "".join(said["deltas"]) == whole["arguments"]
    assert said["called"] == [{"city": "Oslo"}] and said["answer"] == REPORT
    assert "tools[0].function.name is missing" in said["errors"][0] and "tool_choice is none_such" in said["errors"][1]


async def test_run_with_tools_in_a_worker_calls_and_answers(libraries: httpx.AsyncClient) -> None:
    said = (await libraries.get("/tools")).json()
    assert said["called"] == [{"city": "Oslo"}], said
    assert said["answer"]["response"] == REPORT and said["answer"]["tool_calls"] == []
    refused = (await libraries.get("/tools", params={"name": "no name"})).json()
    assert "5006: tools[0].function.name is 'no name'" in refused["message"], refused


@pytest.mark.parametrize("route", ["/generate-tools", "/stream-tools"])
async def test_the_ai_sdk_in_a_worker_calls_tools_and_answers(libraries: httpx.AsyncClient, route: str) -> None:
    said = (await libraries.get(route)).json()
    assert said == {"called": [{"city": "Oslo"}], "text": REPORT, "ends": ["tool-calls", "stop"]}
    forced = (await libraries.get(route, params={"choice": "named"})).json()
    assert forced["called"] == [{"city": "Oslo"}] * 2 and forced["text"] == ""
    assert (await libraries.get(route, params={"choice": "none"})).json()["called"] == []


async def test_a_worker_finds_the_models(libraries: httpx.AsyncClient) -> None:
    assert (await libraries.get("/models")).json() == [MODEL]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def wrangler(demo_fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """wrangler's dev server over a project and code that know nothing of Tandem."""
    home = tmp_path_factory.mktemp("wrangler")
    with wrangler_dev(f"{demo_fleet.base_url}/client/v4", "acc1", home) as log:
        await until(lambda: url_in(log) is not None, 60, log.read_text)
        async with httpx.AsyncClient(base_url=str(url_in(log)), timeout=60, trust_env=False) as http:
            yield http


async def test_wrangler_4_14_runs_streams_and_finds_models(wrangler: httpx.AsyncClient) -> None:
    ask = {"model": MODEL, "prompt": "Hi", "max_tokens": 16, "seed": 3}
    whole = (await wrangler.post("/", json=ask)).json()
    streamed = await wrangler.post("/", json={**ask, "stream": True})
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["response"] for event in events[:-1]) == whole["response"] != ""
    assert whole["requestId"]
    assert (await wrangler.post("/", json={})).json() == [MODEL]


async def test_wrangler_4_14_gets_the_bindings_errors(wrangler: httpx.AsyncClient) -> None:
    refused = (await wrangler.post("/", json={"model": "@cf/none/such", "prompt": "Hi"})).json()
    assert refused["name"] == "InferenceUpstreamError" and refused["message"].startswith("5007: no model")
    queued = {"model": MODEL, "prompt": "Hi", "options": {"queueRequest": True}}
    assert "queueRequest is not supported" in (await wrangler.post("/", json=queued)).json()["message"]


async def test_miniflare_runs_streams_and_finds_models_by_its_remote_proxy(demo_fleet: Fleet) -> None:
    proxy = f"{demo_fleet.base_url}/client/v4/accounts/acc1/ai/run/proxy"
    said: Any = await asyncio.to_thread(output_of, "miniflare.mjs", proxy, MODEL)
    events = [line.removeprefix("data: ") for line in said["streamed"].splitlines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["response"] for event in events[:-1]) == said["whole"]["response"] != ""
    assert said["whole"]["requestId"] and said["models"] == [MODEL]
    assert said["refused"]["message"].startswith("5007: no model")
