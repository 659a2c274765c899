"""The log probabilities of an echoed prompt equal those of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.fleet import Fleet
from tests.system.reference import prompt_logprobs
from tests.system.streams import MODEL, client

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_an_echoed_prompt_has_the_log_probabilities_of_the_reference(
    demo_fleet: Fleet, checkpoint: Callable[[str], Path]
) -> None:
    prompt = random.Random(3).choices(range(3, 300), k=50)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 2}
    async with client(demo_fleet.base_url) as http:
        response = await http.post("/v1/completions", json=body)
        plain = (await http.post("/v1/completions", json={**body, "echo": False})).json()
    assert response.status_code == 200, response.text
    answer = response.json()
    logprobs = answer["choices"][0]["logprobs"]
    reference = prompt_logprobs(checkpoint("demo"), prompt)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:50] == pytest.approx(reference, abs=2e-3)
    assert all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"][1:50])  # fewer where two have one text
    assert logprobs["tokens"][50:] == plain["choices"][0]["logprobs"]["tokens"]
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] == 50
    assert answer["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    await demo_fleet.pools_are_full()
