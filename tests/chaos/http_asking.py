"""How does a client ask over HTTP, as OpenAI's do, and is the whole of the gateway exact, too?"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.chaos.questions import MODEL_ID, Question

_PATH = "/v1/completions"


@dataclass(frozen=True)
class HttpQuestion:
    """A body, and what the fleet answered to it before anything was done to it."""

    body: Mapping[str, Any]
    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    num_completion_tokens: int
    num_prompt_tokens: int


@dataclass
class HttpTold:
    """What came of one."""

    question: HttpQuestion
    request_id: str = ""
    leave_after: int | None = None
    """Events after which the client hangs up; 0: before the first."""
    has_left: bool = False
    failure: str = ""

    def differences(self, texts: Sequence[str], finish_reasons: Sequence[str], usage: Mapping[str, Any]) -> str:
        told = (tuple(texts), tuple(finish_reasons), usage["prompt_tokens"], usage["completion_tokens"])
        expected = self.question
        wanted = (expected.texts, expected.finish_reasons, expected.num_prompt_tokens, expected.num_completion_tokens)
        return "" if told == wanted else f"told {told}, undisturbed {wanted}"


async def make_http_questions(
    http: httpx.AsyncClient, questions: Sequence[Question], chance: random.Random
) -> list[HttpQuestion]:
    """Ask each question undisturbed; a third of them get a stop string that occurs in the answer."""
    made = []
    for question in questions:
        body = _body(question)
        told = await _whole(http, body)
        if chance.random() < 0.4 and len(told.texts[0]) > 8:
            start = chance.randrange(2, len(told.texts[0]) - 4)
            told = await _whole(http, {**body, "stop": [told.texts[0][start : start + 2]]})
        made.append(told)
    return made


async def ask_over_http(http: httpx.AsyncClient, told: HttpTold) -> None:
    """Stream the answer, and note in what it differs from the undisturbed one."""
    texts, finish_reasons = [""] * len(told.question.texts), [""] * len(told.question.texts)
    usage: Mapping[str, Any] = {}
    num_events = 0
    body = {**told.question.body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", _PATH, json=body) as response:
        told.request_id = response.headers.get("x-request-id", "")
        if response.status_code != 200:
            told.failure = f"{response.status_code}: {(await response.aread()).decode()}"
            return
        async for line in response.aiter_lines():
            if told.leave_after is not None and num_events >= told.leave_after:
                told.has_left = True
                return
            if line == "data: [DONE]":
                told.failure = told.differences(texts, finish_reasons, usage)
                return
            if line.startswith("data: "):
                num_events += 1
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    told.failure = str(event["error"])
                    return
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
                    finish_reasons[choice["index"]] = choice["finish_reason"] or finish_reasons[choice["index"]]
    told.failure = f"the stream ended without [DONE] after {num_events} events"


def _body(question: Question) -> dict[str, Any]:
    sampling = question.sampling
    return {
        "model": MODEL_ID,
        "prompt": list(question.prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "seed": question.seeds[0],
        "n": len(question.seeds),
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias.items()},
        "logprobs": sampling.num_logprobs,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
    }


async def _whole(http: httpx.AsyncClient, body: dict[str, Any]) -> HttpQuestion:
    response = await http.post(_PATH, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    return HttpQuestion(
        body,
        tuple(choice["text"] for choice in choices),
        tuple(choice["finish_reason"] for choice in choices),
        answer["usage"]["completion_tokens"],
        answer["usage"]["prompt_tokens"],
    )
