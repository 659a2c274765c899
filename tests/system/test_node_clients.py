"""Tests existing clients for Node.js and Cloudflare Workers: complete answers, streams, and errors."""

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
    output: Any = await asyncio.to_thread(output_of, "openai.mjs", f"{demo_fleet.base_url}/v1", MODEL)
    choice = output["whole"]["choices"][0]
    assert output["streamed"] == choice["message"]["content"] != ""
    assert output["finish"] == choice["finish_reason"]
    assert output["usage"]["completion_tokens"] == output["whole"]["usage"]["completion_tokens"]
    assert len(output["plain"]["choices"][0]["logprobs"]["tokens"]) == output["plain"]["usage"]["completion_tokens"]
    assert output["models"] == [MODEL]
    assert [(error["kind"], error["status"]) for error in output["errors"]] == [
        ("NotFoundError", 404),
        ("BadRequestError", 400),
        ("BadRequestError", 400),
    ]
    words = [error["message"] for error in output["errors"]]
    assert "no-such-model" in words[0] and "temperature" in words[1] and "tools[0].name is missing" in words[2]
    await demo_fleet.pools_are_full()


async def test_openai_for_node_works_at_cloudflares_address_too(demo_fleet: Fleet) -> None:
    base_url = f"{demo_fleet.base_url}/client/v4/accounts/acc/ai/v1"
    output: Any = await asyncio.to_thread(output_of, "openai.mjs", base_url, MODEL)
    assert output["streamed"] == output["whole"]["choices"][0]["message"]["content"]
    assert [error["status"] for error in output["errors"]] == [400, 400, 400]


async def test_cloudflare_for_node_runs_streams_and_lists(demo_fleet: Fleet) -> None:
    output: Any = await asyncio.to_thread(output_of, "cloudflare.mjs", f"{demo_fleet.base_url}/client/v4", MODEL)
    events = [line.removeprefix("data: ") for line in output["lines"]]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["response"] for event in events[:-1]) == output["whole"]["response"] != ""
    assert output["models"] == [MODEL] and "prompt" in output["input"]
    assert output["errors"] == [
        {"kind": "BadRequestError", "status": 400, "code": 5007},
        {"kind": "BadRequestError", "status": 400, "code": 5006},
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def libraries(
    started_demo_fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx.AsyncClient]:
    """A Worker in stock workerd that calls env.AI through libraries."""
    folder: Path = bundled_worker(tmp_path_factory.mktemp("worker"))
    with example_worker(started_demo_fleet.gateway.http_address, folder) as url:
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
    output: Any = await asyncio.to_thread(output_of, "openai_tools.mjs", f"{demo_fleet.base_url}/v1", MODEL)
    whole, streamed = (output[name]["message"]["tool_calls"][0]["function"] for name in ("whole", "streamed"))
    assert whole == streamed and whole["name"] == "get_weather" and json.loads(whole["arguments"]) == {"city": "Oslo"}
    assert output["whole"]["finish_reason"] == output["streamed"]["finish_reason"] == "tool_calls"
    assert len(output["deltas"]) > 3 and "".join(output["deltas"]) == whole["arguments"]
    assert output["called"] == [{"city": "Oslo"}] and output["answer"] == REPORT
    assert (
        "tools[0].function.name is missing" in output["errors"][0] and "tool_choice is none_such" in output["errors"][1]
    )


async def test_run_with_tools_in_a_worker_calls_and_answers(libraries: httpx.AsyncClient) -> None:
    output = (await libraries.get("/tools")).json()
    assert output["called"] == [{"city": "Oslo"}], output
    assert output["answer"]["response"] == REPORT and output["answer"]["tool_calls"] == []
    refused = (await libraries.get("/tools", params={"name": "no name"})).json()
    assert "5006: tools[0].function.name is 'no name'" in refused["message"], refused


@pytest.mark.parametrize("route", ["/generate-tools", "/stream-tools"])
async def test_the_ai_sdk_in_a_worker_calls_tools_and_answers(libraries: httpx.AsyncClient, route: str) -> None:
    output = (await libraries.get(route)).json()
    assert output == {"called": [{"city": "Oslo"}], "text": REPORT, "ends": ["tool-calls", "stop"]}
    forced = (await libraries.get(route, params={"choice": "named"})).json()
    assert forced["called"] == [{"city": "Oslo"}] * 2 and forced["text"] == ""
    assert (await libraries.get(route, params={"choice": "none"})).json()["called"] == []


async def test_a_worker_finds_the_models(libraries: httpx.AsyncClient) -> None:
    assert (await libraries.get("/models")).json() == [MODEL]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def wrangler(
    started_demo_fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx.AsyncClient]:
    """wrangler's dev server over an ordinary project, without Tandem in its code."""
    home = tmp_path_factory.mktemp("wrangler")
    with wrangler_dev(f"{started_demo_fleet.base_url}/client/v4", "acc1", home) as log:
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
    output: Any = await asyncio.to_thread(output_of, "miniflare.mjs", proxy, MODEL)
    events = [line.removeprefix("data: ") for line in output["streamed"].splitlines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["response"] for event in events[:-1]) == output["whole"]["response"] != ""
    assert output["whole"]["requestId"] and output["models"] == [MODEL]
    assert output["refused"]["message"].startswith("5007: no model")
