"""The scores of an echoed prompt are limited, recorded and priced like other requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from control_plane.accounts.limits import Limits
from control_plane.accounts.service import Accounts
from control_plane.generation import TokenRequest
from tandem_runtime.errors import Unavailable
from tests.control_plane.accounts.test_metering import HELLO, world
from tests.control_plane.api.scripted_dispatcher import Script


def scored(request: TokenRequest) -> Script:
    target = next(iter(request.sampling.logit_bias), None)
    return Script(HELLO) if target is None else Script([target], finish_reason="length", num_cached_tokens=1)


ECHO: dict[str, Any] = {"model": "demo", "prompt": [5, 6, 7, 8], "echo": True, "logprobs": 0}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_scores_of_an_echo_are_limited_written_down_and_paid(accounts: Accounts, stream: bool) -> None:
    async with world(accounts, limits=Limits(2, 1000, 1)) as here:
        here.gateway.dispatcher.choose = scored
        body = {**ECHO, "max_tokens": 9, "stream": stream, "stream_options": {"include_usage": True}}
        answer = await here.gateway.client.post("/v1/completions", json=body if stream else {**ECHO, "max_tokens": 9})
        assert answer.status_code == 200, answer.text
        window, rows = await here.window(), await here.rows()
        request_id = answer.headers["cf-ai-req-id"]
        by_id = {row.request_id: row for row in rows}
        scores, text = by_id[f"{request_id}-prompt"], by_id[request_id]
        assert len(rows) == 2 and scores.status == text.status == "finished"
        assert (scores.num_asked_tokens, scores.num_prompt_tokens, scores.num_completion_tokens) == (6, 6, 3)
        assert (scores.num_cached_tokens, scores.microneurons) == (3, (3 + 1.5 + 6) * 1e6)
        used = sum(row.num_prompt_tokens + row.num_completion_tokens for row in rows)
        assert (window.num_requests, window.num_tokens, window.running) == (2, used, {})
        neurons = (scores.microneurons + text.microneurons) / 1e6
        if stream:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            assert events[-1]["usage"]["neurons"] == neurons and "cf-ai-neurons" not in answer.headers
        else:
            assert answer.json()["usage"]["neurons"] == neurons == float(answer.headers["cf-ai-neurons"])
        refused = await here.gateway.client.post("/v1/completions", json=ECHO)
        assert refused.status_code == 429 and len(await here.rows()) == 2


async def test_scores_that_no_minute_has_room_for_are_refused_by_name(accounts: Accounts) -> None:
    async with world(accounts, limits=Limits(max_tokens_per_minute=100)) as here:
        answer = await here.gateway.client.post("/v1/completions", json={**ECHO, "prompt": [5] * 20})
        assert answer.status_code == 400 and "reads of this prompt 190 tokens" in answer.text
        assert here.gateway.dispatcher.requests == [] and await here.rows() == []


async def test_scores_that_fail_are_paid_as_far_as_they_came(accounts: Accounts) -> None:
    async with world(accounts, limits=Limits(None, 1000, 1)) as here:
        here.gateway.dispatcher.choose = lambda request: (
            scored(request) if len(request.token_ids) > 1 else Script([1], pause_after=0, fail_after=0)
        )
        pending = asyncio.create_task(here.gateway.client.post("/v1/completions", json=ECHO))
        streams = here.gateway.dispatcher.streams
        async with asyncio.timeout(10):
            while len(streams) < 3 or not all(each.ended for each in streams[:2]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        streams[2].script.failure = Unavailable("lost")
        streams[2].script.resume.set()
        assert (await pending).status_code == 503
        row, window = await here.row(), await here.window()
    assert (row.request_id[-7:], row.status, row.error) == ("-prompt", "failed", "Unavailable")
    assert (row.num_prompt_tokens, row.num_completion_tokens) == (3 + 2, 2)
    assert window.running == {} and window.num_tokens == 7
