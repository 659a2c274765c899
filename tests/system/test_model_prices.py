"""Prices of a model in tandem.toml reach answers, the ledger and the lists that clients read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cloudflare import AsyncCloudflare

from control_plane.settings import ControlPlaneSettings
from tandem_runtime.settings import load_settings
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet
from tests.system.streams import client

TANDEM_TOML = """
[models."@tandem/demo"]
aliases = ["house"]
prices = { input = 11.0, cached_input = 5.5, output = 22.0 }    # 1, 0.5 and 2 neurons a token

[models."somebody/else"]
prices = { input = 900, cached_input = 900, output = 900 }
"""
RUN = "/client/v4/accounts/acc/ai/run"


async def test_prices_of_tandem_toml_reach_answers_ledger_and_lists(tmp_path: Path) -> None:
    (tmp_path / "tandem.toml").write_text(TANDEM_TOML)
    settings = load_settings(ControlPlaneSettings, "control", ["--config", str(tmp_path / "tandem.toml")])
    async with Fleet(tmp_path, models=settings.models) as fleet:
        fleet.start("decode", "decode-0", *SMALL)
        await fleet.ready()
        async with client(fleet.base_url) as http:
            told = 0.0
            # 1. Each face, by name and by alias, whole and streamed, says what the table makes of its tokens.
            prompt = "A prompt that is long enough to leave a block or two in the cache. " * 4
            ask = {"prompt": prompt, "max_tokens": 4, "seed": 5}
            whole = await http.post(f"{RUN}/house", json=ask)
            told += _checked(whole.json()["result"]["usage"])
            assert float(whole.headers["cf-ai-neurons"]) == pytest.approx(told)
            binding = {"cf-consn-model-id": "@tandem/demo"}
            streamed = await http.post("/run", json={"inputs": {**ask, "stream": True}}, headers=binding)
            events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
            told += _checked(events[-1]["usage"])
            openai = await http.post("/v1/completions", json={"model": "house", **ask})
            told += _checked(openai.json()["usage"])
            again = (await http.post(f"{RUN}/house", json=ask)).json()["result"]["usage"]
            told += _checked(again)
            assert again["prompt_tokens_details"]["cached_tokens"] > 0 and again["neurons"] < again["total_tokens"]
            # 2. The ledger's sums are the same.
            report = [
                entry
                for account in ("acc", "default")
                for entry in (await http.get(f"/client/v4/accounts/{account}/ai/usage")).json()["result"]
            ]
            assert {entry["model"] for entry in report} == {"@tandem/demo"}
            assert sum(entry["neurons"] for entry in report) == pytest.approx(told)
            assert sum(entry["cost_usd"] for entry in report) == pytest.approx(told * 0.000011)
        # 3. Who looks for models sees what they cost, in Cloudflare's form.
        cloudflare = AsyncCloudflare(base_url=f"{fleet.base_url}/client/v4", api_token="unused")
        found: list[Any] = [model async for model in cloudflare.ai.models.list(account_id="acc")]
        [prices] = [each["value"] for each in found[0]["properties"] if each["property_id"] == "price"]
        assert {each["unit"]: (each["price"], each["currency"]) for each in prices} == {
            "per M input tokens": (11.0, "USD"),
            "per M cached input tokens": (5.5, "USD"),
            "per M output tokens": (22.0, "USD"),
        }
        await cloudflare.close()
        await fleet.pools_are_full()


def _checked(usage: dict[str, Any]) -> float:
    """Return the neurons that a usage tells, which are its tokens by the table."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    neurons = usage["prompt_tokens"] - cached + 0.5 * cached + 2 * usage["completion_tokens"]
    assert usage["neurons"] == pytest.approx(neurons)
    return float(usage["neurons"])
