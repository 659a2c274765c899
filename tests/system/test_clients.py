"""Common clients work: streamed and not, with errors, and when they leave half-way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import cloudflare
import httpx
import openai
import pytest
import pytest_asyncio

from tandem_client import AI, AsyncAI, NotFoundError
from tests.examples.workerd import example_worker
from tests.system.fleet import Fleet
from tests.system.streams import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUESTION: list[Any] = [{"role": "user", "content": "What is a KV cache?"}]
LONG: dict[str, Any] = {"max_tokens": 900, "temperature": 5, "seed": 9}
"""A temperature at which an answer does not end before the client disconnects."""
T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run a blocking client in a thread; the gateway runs on this loop."""
    return await asyncio.wait_for(asyncio.to_thread(work), 60)


# The openai SDK for Python


@pytest_asyncio.fixture(loop_scope="session")
async def openai_client(demo_fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{demo_fleet.base_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


async def test_openai_streams_what_it_answers_whole(openai_client: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "seed": 5}
    whole = await openai_client.chat.completions.create(**ask)
    chunks = await openai_client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    text, usage, finish = "", None, None
    async for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


async def test_openai_gets_its_own_errors(openai_client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        await openai_client.chat.completions.create(model="no-such-model", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await openai_client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-3)


async def test_openai_may_leave_half_way(openai_client: openai.AsyncOpenAI, demo_fleet: Fleet) -> None:
    chunks = await openai_client.completions.create(
        model=MODEL, prompt="Once", stream=True, max_tokens=900, extra_body={"ignore_eos": True}
    )
    async for _ in chunks:
        break
    await chunks.close()
    await demo_fleet.pools_are_full()


# The cloudflare SDK for Python


def cloudflare_client(fleet: Fleet) -> cloudflare.Cloudflare:
    return cloudflare.Cloudflare(base_url=f"{fleet.base_url}/client/v4", api_token="unused", max_retries=0)


async def test_cloudflare_runs_streams_and_lists(demo_fleet: Fleet) -> None:
    def work() -> tuple[Any, list[Any], list[str]]:
        with cloudflare_client(demo_fleet) as client:
            ask: dict[str, Any] = {"account_id": "acc", "prompt": "Hi", "max_tokens": 16, "seed": 7}
            whole = client.ai.run(MODEL, **ask)
            with client.ai.with_streaming_response.run(MODEL, **ask, stream=True) as response:
                lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
            names = [model["name"] for model in client.ai.models.list(account_id="acc")]  # type: ignore[index]
            return whole, lines, names

    whole, lines, names = await run_in_thread(work)
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["response"] for line in lines[:-1]) == whole["response"]
    assert names == [MODEL]


async def test_cloudflare_gets_its_own_errors(demo_fleet: Fleet) -> None:
    def work() -> None:
        with cloudflare_client(demo_fleet) as client:
            client.ai.run("@cf/none/such", account_id="acc", prompt="Hi")

    with pytest.raises(cloudflare.BadRequestError) as caught:
        await run_in_thread(work)
    assert caught.value.errors[0].code == 5007


async def test_cloudflare_may_leave_half_way(demo_fleet: Fleet) -> None:
    def work() -> None:
        with (
            cloudflare_client(demo_fleet) as client,
            client.ai.with_streaming_response.run(
                MODEL, account_id="acc", prompt="Once", stream=True, extra_body={"raw": True, **LONG}
            ) as response,
        ):
            next(iter(response.iter_lines()))

    await run_in_thread(work)
    await demo_fleet.pools_are_full()


# LangChain, with langchain-cloudflare


def langchain_model(fleet: Fleet, **changes: Any) -> Any:
    chat = pytest.importorskip("langchain_cloudflare", reason="langchain-cloudflare is not installed (extra `dev`)")
    where = {"account_id": "acc", "api_token": "unused", "base_url": f"{fleet.base_url}/client/v4"}
    options = {"model": MODEL, "max_tokens": 24, "temperature": 0.0, "max_retries": 0, **changes}
    return chat.ChatCloudflareWorkersAI(**where, **options)


async def test_langchain_streams_what_it_answers_whole(demo_fleet: Fleet) -> None:
    chat = langchain_model(demo_fleet, session_id="ses_1")
    whole = await chat.ainvoke("What is a KV cache?")
    chunks = [chunk async for chunk in chat.astream("What is a KV cache?")]
    assert "".join(chunk.content for chunk in chunks) == whole.content != ""
    assert whole.usage_metadata["output_tokens"] > 0
    blocking = await run_in_thread(lambda: chat.invoke("What is a KV cache?"))
    assert blocking.content == whole.content


async def test_langchain_gets_the_errors(demo_fleet: Fleet) -> None:
    for changes, code in (({"model": "@cf/none/such"}, 5007), ({"temperature": 9.0}, 5006)):
        with pytest.raises(httpx.HTTPStatusError) as caught:
            await langchain_model(demo_fleet, **changes).ainvoke("Hi")
        assert caught.value.response.json()["errors"][0]["code"] == code


# A Worker in stock workerd


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def worker(started_demo_fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    with example_worker(started_demo_fleet.gateway.http_address) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            yield http


async def test_a_worker_streams_what_it_answers_whole(worker: httpx.AsyncClient) -> None:
    whole = (await worker.get("/run", params={"prompt": "Hi", "max_tokens": 16, "seed": 3})).json()
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16, "seed": 3}
    response = await worker.post("/chat", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["response"] for line in lines[:-1]) == whole["response"]


async def test_a_worker_gets_the_bindings_error(worker: httpx.AsyncClient) -> None:
    response = await worker.get("/run", params={"prompt": "Hi", "model": "@cf/none/such"})
    assert (response.status_code, response.json()["code"]) == (400, 5007)
    assert response.json()["name"] == "InferenceUpstreamError"
    assert "@cf/none/such" in response.json()["error"]


async def test_a_worker_whose_visitor_leaves_cancels_decode(worker: httpx.AsyncClient, demo_fleet: Fleet) -> None:
    body = {"messages": [{"role": "user", "content": "Once"}], **LONG}
    async with worker.stream("POST", "/chat", json=body) as response:
        async for _ in response.aiter_lines():
            break
    await demo_fleet.pools_are_full()


# Our own client


async def test_our_own_client_streams_and_answers_whole(demo_fleet: Fleet) -> None:
    inputs: dict[str, Any] = {"prompt": "Hi", "max_tokens": 16, "seed": 3}

    def work() -> tuple[str, str]:
        with AI(demo_fleet.base_url) as ai:
            stream: Any = ai.run(MODEL, {**inputs, "stream": True})
            whole: Any = ai.run(MODEL, inputs)
            return "".join(stream), whole["response"]

    streamed, whole = await run_in_thread(work)
    assert streamed == whole
    async with AsyncAI(demo_fleet.base_url) as ai:
        with pytest.raises(NotFoundError, match="@cf/none/such"):
            await ai.run("@cf/none/such", {"prompt": "Hi"})
        left: Any = await ai.run(MODEL, {"prompt": "Once", "raw": True, "stream": True, **LONG})
        async with left:
            async for _ in left:
                break
    await demo_fleet.pools_are_full()
