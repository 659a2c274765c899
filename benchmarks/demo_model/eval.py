"""Sends the held-out questions to a running gateway, and collects the answers.

Chats go to `/v1/chat/completions` as any client's do. A chat with tools goes to `/v1/completions` as the text that the
model's own chat template makes of it: so the model writes its calls by itself, with no grammar to help it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

import httpx

from benchmarks.lib.served import Served
from benchmarks.lib.streaming import new_client
from control_plane.text.template import ChatTemplate
from demo_model.corpus import held_out
from demo_model.corpus.sample import Message
from demo_model.corpus.split import Split
from demo_model.corpus.stories import stories

_MAX_TOKENS = 400
_AT_A_TIME = 8
_STORIES = "stories"
_README = ("What is a KV cache?", "How do I stream tokens?", "What is 17 + 25?")


@dataclass(frozen=True)
class Question:
    """A chat up to the answer. `expected` is the one right answer, word for word; stories have none."""

    family: str
    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    expected: str | None = None
    topic: tuple[str, ...] = ()
    """Words that an answer to the point has."""

    @property
    def asked(self) -> str:
        """What the user said last."""
        return next(message.content for message in reversed(self.messages) if message.role == "user")


@dataclass(frozen=True)
class Evaluated:
    """A question with the answer it got. `finish_reason` as the gateway gives it."""

    question: Question
    answer: str
    finish_reason: str

    @property
    def is_right(self) -> bool:
        """Whether the answer is the expected one, but for white space around it."""
        return self.question.expected is not None and self.answer.strip() == self.question.expected.strip()

    @property
    def is_on_topic(self) -> bool:
        """Whether it has at least half of the words that an answer to the point has."""
        said = set(_words(self.answer))
        return 2 * sum(word in said for word in self.question.topic) >= len(self.question.topic)


def _words(text: str) -> list[str]:
    return "".join(letter.lower() if letter.isalnum() else " " for letter in text).split()


def questions(per_family: int) -> list[Question]:
    """Return the held-out questions of every graded family, always the same ones."""
    return [
        Question(item.family, item.messages, item.tools, item.expected, tuple(dict.fromkeys(_words(item.expected))))
        for item in held_out(per_family)
    ]


def story_requests(number: int) -> list[Question]:
    """Ask for stories about heroes; to the point is what speaks of the hero."""
    random = Random("stories")
    samples = [stories(random, Split.HELD_OUT) for _ in range(number)]
    about = [sample for sample in samples if sample.values in sample.messages[0].content]
    return [
        Question(_STORIES, sample.messages[:1], topic=tuple(_words(sample.values)[1:]))  # without `a` or `an`
        for sample in about
    ]


def readme_questions() -> list[Question]:
    """Return the questions that the README shows."""
    return [Question("readme", (Message("user", text),)) for text in _README]


class Evaluator:
    """Puts questions to one gateway, so many at a time; `async with`."""

    def __init__(self, served: Served, checkpoint: Path) -> None:
        self._model = served.model
        self._client = new_client(served.base_url)
        self._template = ChatTemplate((checkpoint / "chat_template.jinja").read_text(), {})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def ask(self, asked: Sequence[Question], *, temperature: float) -> list[Evaluated]:
        """Return the answers in the order of the questions; raises RuntimeError for one that does not come whole."""
        answers: dict[int, Evaluated] = {}
        waiting = iter(enumerate(asked))
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_A_TIME):
                group.create_task(self._keep_asking(waiting, answers, temperature))
        return [answers[number] for number in range(len(asked))]

    async def _keep_asking(
        self, waiting: Iterator[tuple[int, Question]], answers: dict[int, Evaluated], temperature: float
    ) -> None:
        for number, question in waiting:
            path, body = self._call(question)
            body |= {"temperature": temperature, "seed": number, "max_tokens": _MAX_TOKENS, "stream": True}
            answers[number] = Evaluated(question, *await _streamed(self._client, path, body))

    def _call(self, question: Question) -> tuple[str, dict[str, Any]]:
        messages = [message.as_dict() for message in question.messages]
        if not question.tools:
            return "/v1/chat/completions", {"model": self._model, "messages": messages}
        return "/v1/completions", {
            "model": self._model,
            "prompt": self._template.render(messages, tools=list(question.tools)),
            "raw": True,  # the text has control tokens
        }


async def _streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Return the text and the finish reason of one streamed answer."""
    pieces: list[str] = []
    finish_reason: str | None = None
    async with client.stream("POST", path, json=body) as answer:
        if not answer.is_success:
            raise RuntimeError(f"{path}: {answer.status_code}: {(await answer.aread()).decode(errors='replace')}")
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if data in (line, "[DONE]"):
                continue
            for choice in json.loads(data).get("choices", ()):
                pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
                finish_reason = choice.get("finish_reason") or finish_reason
    if finish_reason is None:
        raise RuntimeError(f"{path}: the stream ended without a finish reason after {len(pieces)} pieces")
    return "".join(pieces), finish_reason
