"""What is a whole answer, when nobody streams it?"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from control_plane.api.openai.objects import UsageObject
from control_plane.generation import AnswerEnd, ModelDescription, Usage
from control_plane.text.choice import TextDelta, TextLogprobs
from control_plane.text.tools.tool import CallDelta


class Answer(Protocol):
    """The running answer to one HTTP request: a TextStream, or several side by side."""

    @property
    def model(self) -> ModelDescription: ...

    @property
    def num_choices(self) -> int: ...

    @property
    def usage(self) -> Usage: ...

    def __aiter__(self) -> AsyncIterator[TextDelta]: ...

    def batches(self) -> AsyncIterator[Iterator[TextDelta]]:
        """Yield the same, all that has come at a time; a batch is read to its end before the next is asked for."""

    async def aclose(self) -> None: ...


@dataclass
class WholeCall:
    call_id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass
class WholeChoice:
    text: str = ""
    logprobs: list[TextLogprobs] = field(default_factory=list)
    finish_reason: AnswerEnd | None = None
    calls: list[WholeCall] = field(default_factory=list)
    is_cut_in_call: bool = False


def add_call(calls: list[WholeCall], delta: CallDelta) -> None:
    """Put a part of a call to those before it."""
    if delta.name is not None:
        calls.append(WholeCall(delta.call_id, delta.name))
    calls[delta.index].arguments += delta.arguments
    calls[delta.index].is_complete = delta.is_last


async def collect(answer: Answer) -> list[WholeChoice]:
    """Read `answer` to its end."""
    parts: list[list[str]] = [[] for _ in range(answer.num_choices)]
    choices = [WholeChoice() for _ in range(answer.num_choices)]
    async for delta in answer:
        choice = choices[delta.choice_index]
        parts[delta.choice_index].append(delta.text)
        choice.logprobs.extend(delta.logprobs)
        for call in delta.calls:
            add_call(choice.calls, call)
        choice.finish_reason = delta.finish_reason or choice.finish_reason
        choice.is_cut_in_call = choice.is_cut_in_call or delta.is_cut_in_call
    for choice, texts in zip(choices, parts, strict=True):
        choice.text = "".join(texts)
    return choices


def usage_json(usage: Usage) -> UsageObject:
    shown: UsageObject = {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
    if usage.microneurons is not None:
        shown["neurons"] = usage.microneurons / 1e6
    return shown
