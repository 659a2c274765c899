"""A client that sends requests over HTTP, as OpenAI's clients do, and checks that the answers are exact."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.chaos.questions import MODEL_ID, Question

_PATH = "/v1/completions"


@dataclass(frozen=True)
class HttpQuestion:
    """A body, and the fleet's answer to it before any fault."""

    body: Mapping[str, Any]
    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    num_completion_tokens: int
    num_prompt_tokens: int


@dataclass
class HttpStreamRecord:
    """One stream over HTTP."""

    question: HttpQuestion
    request_id: str = ""
    leave_after: int | None = None
    """The number of events after which the client disconnects; 0: before the first."""
    has_left: bool = False
    num_refused: int = 0
    """503 since the database, on the full disk, could not be written; the client sends the request again."""
    failure: str = ""

    def differences(self, texts: Sequence[str], finish_reasons: Sequence[str], usage: Mapping[str, Any]) -> str:
        record = (tuple(texts), tuple(finish_reasons), usage["prompt_tokens"], usage["completion_tokens"])
        expected = self.question
        wanted = (expected.texts, expected.finish_reasons, expected.num_prompt_tokens, expected.num_completion_tokens)
        return "" if record == wanted else f"record {record}, undisturbed {wanted}"


async def make_http_questions(
    http: httpx.AsyncClient, questions: Sequence[Question], rng: random.Random
) -> list[HttpQuestion]:
    """Send each question undisturbed; a third of them get a stop string that occurs in the answer."""
    made = []
    for question in questions:
        body = _body(question)
        record = await _whole(http, body)
        if rng.random() < 0.4 and len(record.texts[0]) > 8:
            start = rng.randrange(2, len(record.texts[0]) - 4)
            record = await _whole(http, {**body, "stop": [record.texts[0][start : start + 2]]})
        made.append(record)
    return made


async def send_over_http(http: httpx.AsyncClient, record: HttpStreamRecord, is_disk_broken: Callable[[], bool]) -> None:
    """Stream the answer, and record how it differs from the undisturbed one.

    What cannot be written down does not run: while the disk is full or read-only, a 503 before the answer is expected,
    and the request is sent again after the seconds that the answer names, as clients do.
    """
    while await _is_refused(http, record, is_disk_broken):
        record.num_refused += 1


async def _is_refused(http: httpx.AsyncClient, record: HttpStreamRecord, is_disk_broken: Callable[[], bool]) -> bool:
    texts, finish_reasons = [""] * len(record.question.texts), [""] * len(record.question.texts)
    usage: Mapping[str, Any] = {}
    num_events = 0
    body = {**record.question.body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", _PATH, json=body) as response:
        record.request_id = response.headers.get("x-request-id", "")
        if response.status_code != 200:
            refusal = (await response.aread()).decode()
            if response.status_code == 503 and "database" in refusal and is_disk_broken():
                await asyncio.sleep(float(response.headers["retry-after"]))
                return True
            record.failure = f"{response.status_code}: {refusal}"
            return False
        async for line in response.aiter_lines():
            if record.leave_after is not None and num_events >= record.leave_after:
                record.has_left = True
                return False
            if line == "data: [DONE]":
                record.failure = record.differences(texts, finish_reasons, usage)
                return False
            if line.startswith("data: "):
                num_events += 1
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    record.failure = str(event["error"])
                    return False
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
                    finish_reasons[choice["index"]] = choice["finish_reason"] or finish_reasons[choice["index"]]
    record.failure = f"the stream ended without [DONE] after {num_events} events"
    return False


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
