"""Adapters over HTTP through a whole fleet, where TANDEM_VLLM_PYTHON names an interpreter with vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.system.bit_flips import engine_pid
from tests.system.fleet import Fleet
from tests.tandem_vllm.adapter_files import make_adapter
from tests.tandem_vllm.test_adapters_in_vllm import PROMPT, alone

PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
MODEL = "@tandem/demo"
NAMES = ("", "red", "blue")
DECODES = ("decode-a", "decode-b")
NUM_TOKENS = 16
START_SECONDS = 200.0

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TANDEM_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name, seed) for seed, name in enumerate(NAMES[1:], 1)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory, adapters: dict[str, Path]) -> AsyncIterator[Fleet]:
    flags = (
        *("--engine", "vllm", "--vllm-python", PYTHON, "--num-threads", "1"),
        *("--max-model-len", "1000", "--num-kv-blocks", "160"),
        *("--adapters", ",".join(f"{name}={folder}" for name, folder in adapters.items())),
    )
    async with Fleet(tmp_path_factory.mktemp("fleet"), suspect_seconds=3.0, gone_seconds=5.0) as fleet:
        fleet.start("kv", "kv-a")
        fleet.start("prefill", "prefill-a", *flags)
        for name in DECODES:
            fleet.start("decode", name, *flags)
        await fleet.ready(seconds=START_SECONDS)
        for name in DECODES:
            await fleet.handed_over(MODEL, "prefill-a", name)
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def http(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=120) as http:
        yield http


def named(adapter: str) -> str:
    return f"{MODEL}:{adapter}" if adapter else MODEL


def asked(adapter: str, num_tokens: int = NUM_TOKENS, **more: Any) -> dict[str, Any]:
    body = {"model": named(adapter), "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return body | more


async def answer(http: httpx.AsyncClient, adapter: str) -> tuple[str, int]:
    """Return the text, and the number of prompt tokens that were found in a cache."""
    response = await http.post("/v1/completions", json=asked(adapter))
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["model"] == named(adapter)
    return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


async def num_computed_by_decode(fleet: Fleet) -> float:
    return sum([(await fleet.stats(name)).counters["reprefill_tokens"] for name in DECODES])


async def test_each_adapter_answers_as_vllm_alone_and_finds_only_what_it_left(
    fleet: Fleet, http: httpx.AsyncClient, adapters: dict[str, Path]
) -> None:
    expected = {}
    for name, tokens in zip(NAMES, await alone(*adapters.values()), strict=True):
        text = await http.post("/detokenize", json={"model": MODEL, "tokens": tokens})
        expected[name] = text.json()["prompt"]
    assert len(set(expected.values())) == len(NAMES)
    before = await num_computed_by_decode(fleet)
    for name in NAMES:  # the same prompt: nothing that another has left is found
        assert await answer(http, name) == (expected[name], 0)
    for name in NAMES:  # each finds its own two full blocks of 32 tokens
        assert await answer(http, name) == (expected[name], 64)
    assert await num_computed_by_decode(fleet) == before, "every prompt was handed over"
    await fleet.pools_are_full()


async def test_an_adapter_is_named_behind_the_model_or_by_lora_and_an_unknown_one_is_an_error_with_the_known_ones(
    http: httpx.AsyncClient,
) -> None:
    listed = (await http.get("/v1/models")).json()["data"]
    assert {each["id"] for each in listed} >= {named(name) for name in NAMES}
    text = "The sea is deep and"
    run = f"/client/v4/accounts/test/ai/run/{MODEL}"
    inputs = {"prompt": text, "raw": True, "max_tokens": NUM_TOKENS, "temperature": 0}
    found = {}
    for name in NAMES:
        native = await http.post(run, json=inputs | ({"lora": name} if name else {}))
        completed = await http.post("/v1/completions", json=asked(name, prompt=text, ignore_eos=False))
        found[name] = native.json()["result"]["response"]
        assert found[name] == completed.json()["choices"][0]["text"]
    assert len(set(found.values())) == len(NAMES)
    unknown = await http.post("/v1/completions", json=asked("green"))
    assert unknown.status_code == 404 and "blue, red" in unknown.text
    unknown = await http.post(run, json=inputs | {"lora": "green"})
    assert unknown.status_code == 400 and "blue, red" in unknown.text, "Workers AI's status for an unknown model"


async def test_an_answer_of_an_adapter_that_loses_its_engine_goes_on_with_that_adapter(
    fleet: Fleet, http: httpx.AsyncClient
) -> None:
    undisturbed = await http.post("/v1/completions", json=asked("red", 300))
    text, killed = "", ""
    async with http.stream("POST", "/v1/completions", json=asked("red", 300, stream=True)) as response:
        num_events = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            num_events += 1
            if num_events == 5:
                running = [name for name in DECODES if (await fleet.stats(name)).num_running]
                (killed,) = running
                os.kill(engine_pid(fleet.services[killed].process.pid), signal.SIGKILL)
    assert text == undisturbed.json()["choices"][0]["text"]
    await asyncio.gather(fleet.ended(fleet.services.pop(killed)))
    await fleet.pools_are_full()
