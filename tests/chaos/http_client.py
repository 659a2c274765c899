"""A client that sends requests over HTTP, as OpenAI's clients do, and checks that the answers are exact.

Most are streamed. Those of bursts are not: what a burst is about is how many requests there are.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx

from tests.chaos.http_gateway import HttpGateway
from tests.chaos.questions import MODEL_ID, Question

_PATIENCE_SECONDS = 120.0
"""So long a client comes back that was refused, or whose gateway was killed."""
_RECONNECT_SECONDS = 0.1


@dataclass(frozen=True)
class HttpQuestion:
    """A body, and the fleet's answer to it before any fault."""

    body: Mapping[str, Any]
    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    num_completion_tokens: int
    num_prompt_tokens: int
    path: ClassVar[str] = "/v1/completions"

    def difference(self, answer: Mapping[str, Any]) -> str:
        """Return how an answer that was not streamed differs from the undisturbed one."""
        taken = _Answer(self)
        taken.take_whole(answer)
        return taken.difference()


@dataclass
class HttpStreamRecord:
    """One stream over HTTP, and how often it was begun."""

    question: HttpQuestion
    is_streamed: bool = True
    request_id: str = ""
    leave_after: int | None = None
    """The number of events after which the client disconnects; 0: before the first."""
    has_left: bool = False
    num_refused: int = 0
    """503 since the database, on the full disk, could not be written, or since the gateway drains."""
    num_overloaded: int = 0
    """429 since the queue was full, in a burst."""
    num_unreached: int = 0
    """No byte of an answer came from a gateway that was killed, drains or starts."""
    broken_ids: list[str] = field(default_factory=list)
    """The answers that had begun when their gateway was killed."""
    failure: str = ""


@dataclass
class _Answer:
    """What has come of an answer."""

    question: HttpQuestion
    asked_at: float = field(default_factory=time.monotonic)
    num_events: int = 0
    has_head: bool = False
    texts: list[str] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.texts, self.finish_reasons = ([""] * len(self.question.texts) for _ in range(2))

    def take(self, event: Mapping[str, Any]) -> None:
        self.num_events += 1
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.texts[choice["index"]] += choice["text"]
            self.finish_reasons[choice["index"]] = choice["finish_reason"] or self.finish_reasons[choice["index"]]

    def take_whole(self, answer: Mapping[str, Any]) -> None:
        """Take an answer that was not streamed."""
        self.usage = answer["usage"]
        for choice in answer["choices"]:
            self.texts[choice["index"]] = choice["text"]
            self.finish_reasons[choice["index"]] = choice["finish_reason"]

    def difference(self) -> str:
        """Return how a whole answer differs from the undisturbed one."""
        expected = self.question
        numbers = self.usage.get("prompt_tokens"), self.usage.get("completion_tokens")
        found = (tuple(self.texts), tuple(self.finish_reasons), *numbers)
        wanted = (expected.texts, expected.finish_reasons, expected.num_prompt_tokens, expected.num_completion_tokens)
        return "" if found == wanted else f"record {found}, undisturbed {wanted}"

    def difference_of_beginning(self) -> str:
        """Return how the beginning of an answer differs from that of the undisturbed one.

        A choice that has a finish reason has its whole text: what was cut off must not look finished.
        """
        expected = self.question
        for text, reason, whole, whole_reason in zip(
            self.texts, self.finish_reasons, expected.texts, expected.finish_reasons, strict=True
        ):
            is_right = (text, reason) == (whole, whole_reason) if reason else whole.startswith(text)
            if not is_right:
                return f"cut off with {text!r} {reason!r}, undisturbed {whole!r} {whole_reason!r}"
        return ""


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


async def send_over_http(gateways: Sequence[HttpGateway], record: HttpStreamRecord) -> None:
    """Stream the answer, and record how it differs from the undisturbed one.

    The first gateway is asked, and while it refuses, cannot be reached or was killed, the next one: as behind a load
    balancer. Where each has refused, the client waits as long as the answers tell.
    """
    gives_up_at = time.monotonic() + _PATIENCE_SECONDS
    number = 0
    pause = _RECONNECT_SECONDS
    while (seconds := await _ask(gateways[number % len(gateways)], record)) is not None:
        if time.monotonic() > gives_up_at:
            record.failure = f"no whole answer in {_PATIENCE_SECONDS:g} s: {record}"
            return
        number += 1
        pause = max(pause, seconds)
        if number % len(gateways) == 0:
            await asyncio.sleep(pause)
            pause = _RECONNECT_SECONDS


async def _ask(gateway: HttpGateway, record: HttpStreamRecord) -> float | None:
    """Send the request once. Return after how many seconds it may be sent again; None: the record is complete."""
    answer, life = _Answer(record.question), gateway.life
    record.request_id = ""
    body = _streaming(record.question.body) if record.is_streamed else record.question.body
    with gateway.calling(life) as call:
        try:
            async with gateway.http.stream("POST", record.question.path, json=body) as response:
                record.request_id = response.headers.get("x-request-id", "")
                answer.has_head = response.status_code == 200
                if response.status_code != 200:
                    return _refused(gateway, life, record, answer, response, (await response.aread()).decode())
                if not record.is_streamed:
                    record.failure = record.question.difference(json.loads(await response.aread()))
                    return None
                async for line in response.aiter_lines():
                    if _is_over(line, answer, record):
                        return None
                    call.has_tokens = answer.num_events > 0
            record.failure = f"the stream ended without [DONE] after {answer.num_events} events"
        except httpx.TransportError as error:
            return _lost(gateway, life, record, answer, error)
    return None


def _is_over(line: str, answer: _Answer, record: HttpStreamRecord) -> bool:
    if record.leave_after is not None and answer.num_events >= record.leave_after:
        record.has_left = True
        record.failure = answer.difference_of_beginning()
        return True
    if line == "data: [DONE]":
        record.failure = answer.difference()
        return True
    if line.startswith("data: "):
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            record.failure = str(event["error"])
            return True
        answer.take(event)
    return False


def _refused(
    gateway: HttpGateway, life: int, record: HttpStreamRecord, answer: _Answer, response: httpx.Response, text: str
) -> float | None:
    retry_after = response.headers.get("retry-after")
    if retry_after is None or not gateway.may_refuse(life, answer.asked_at, response.status_code, text):
        record.failure = f"{gateway.name}: {response.status_code}, retry-after {retry_after}: {text}"
        return None
    record.num_overloaded += response.status_code == 429
    record.num_refused += response.status_code != 429
    return float(retry_after)


def _lost(
    gateway: HttpGateway, life: int, record: HttpStreamRecord, answer: _Answer, error: httpx.TransportError
) -> float | None:
    """Judge a connection that broke, or that there was none."""
    record.failure = answer.difference_of_beginning()
    if not record.failure and not gateway.may_lose(life, has_head=answer.has_head):
        begun = f"after its head and {answer.num_events} events" if answer.has_head else "before its head"
        record.failure = (
            f"{gateway.name}: {_causes(error)} {begun}, {time.monotonic() - answer.asked_at:.3f} s after it was sent, "
            f"at {time.strftime('%H:%M:%S')}"
        )
    if answer.has_head:
        record.broken_ids.append(record.request_id)
    else:
        record.num_unreached += 1
    return None if record.failure else _RECONNECT_SECONDS


def _causes(error: BaseException) -> str:
    """Return an error with what it was made of: whether the gateway or the client closed a connection."""
    before = error.__cause__ or error.__context__
    return repr(error) if before is None else f"{error!r} of {_causes(before)}"


def _streaming(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


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
    response = await http.post(HttpQuestion.path, json=body)
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
