"""An existing Cloudflare Worker runs at once on the built-in model, and a header names the substitute."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.examples.running_dev import TOOLS, install, running_dev
from tests.examples.workerd import FOLDER
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet

DEMO = "@tandem/demo"
LLAMA, GPT = "@cf/meta/llama-3.1-8b-instruct", "@cf/openai/gpt-oss-20b"
HEADER = "tandem-fallback-model"
RUN = "/client/v4/accounts/acc/ai/run"


async def test_one_model_answers_for_all_of_text_and_says_so(tmp_path: Path) -> None:
    async with Fleet(tmp_path, fallback_model=DEMO) as fleet:
        fleet.start("decode", "decode-0", *SMALL)
        await fleet.ready()
        async with httpx.AsyncClient(base_url=fleet.base_url, timeout=60, trust_env=False) as client:

            async def ask(path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
                return await client.post(path, json=body, headers=headers)

            # 1. Each face answers, whole and streamed, and names who did.
            prompt = {"prompt": "Hi", "max_tokens": 8, "seed": 5}
            binding = {"cf-consn-model-id": LLAMA}
            native = await ask("/run", {"inputs": prompt}, **binding)
            streamed = await ask("/run", {"inputs": {**prompt, "stream": True}}, **binding)
            rest = await ask(f"{RUN}/{LLAMA}", prompt)
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "seed": 5}
            openai = await ask("/v1/chat/completions", {"model": "gpt-4o", **chat})
            for answer in (native, streamed, rest, openai):
                assert (answer.status_code, answer.headers.get(HEADER)) == (200, DEMO), answer.text
            assert native.json()["response"] == rest.json()["result"]["response"]
            assert "[DONE]" in streamed.text and openai.json()["model"] == DEMO
            # 2. The answer has the form that a client of the model asked for reads.
            newer = await ask(f"{RUN}/{GPT}", chat)
            assert newer.json()["result"]["choices"] and newer.json()["result"]["model"] == DEMO
            # 3. Who asks for what is loaded is told nothing.
            own = await ask(f"{RUN}/{DEMO}", prompt)
            assert own.status_code == 200 and HEADER not in own.headers
            assert own.json()["result"]["response"] == rest.json()["result"]["response"]
            # 4. A model of another task is not here.
            embedding = await ask(f"{RUN}/@cf/baai/bge-m3", prompt)
            assert (embedding.status_code, embedding.json()["errors"][0]["code"]) == (400, 5007)
            assert HEADER not in embedding.headers
        await fleet.pools_are_full()


@pytest.mark.services
async def test_the_example_worker_runs_untouched_before_a_real_gateway(tmp_path: Path) -> None:
    folder = install(tmp_path / "worker", TOOLS[0])
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("node_modules", ".wrangler"), dirs_exist_ok=True)

    def chat(gateway_url: str) -> tuple[dict[str, Any], str]:
        with running_dev(folder, "--gateway", gateway_url) as running:
            url = running.url
            whole = httpx.get(f"{url}/run?prompt=Hi&max_tokens=8&seed=5", trust_env=False, timeout=60)
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
            streamed = httpx.post(f"{url}/chat", json=body, trust_env=False, timeout=60)
            assert running.end() == 0
        return whole.json(), streamed.text

    async with Fleet(tmp_path, fallback_model=DEMO) as fleet:
        fleet.start("decode", "decode-0", *SMALL)
        await fleet.ready()
        whole, streamed = await asyncio.to_thread(chat, fleet.base_url)
        assert whole["response"] and whole["usage"]["completion_tokens"] > 0
        assert streamed.endswith("data: [DONE]\n\n")
        await fleet.pools_are_full()
