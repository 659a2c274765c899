"""Collects the deltas of an answer into whole choices, for answers that are not streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from control_plane.explain.history import History
from control_plane.generation import AnswerEnd, ModelDescription, Usage
from control_plane.text.choice import TextDelta, TextLogprobs
from control_plane.text.tool import CallDelta


class Answer(Protocol):
    """The running answer to one HTTP request: a TextStream or a MultiPromptStream."""

    @property
    def model(self) -> ModelDescription: ...

    @property
    def num_choices(self) -> int: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def histories(self) -> Sequence[History]:
        """What the dispatcher has done, by prompt."""

    def __aiter__(self) -> AsyncIterator[TextDelta]: ...

    def batches(self) -> AsyncIterator[Iterator[TextDelta]]:
        """Yield the same deltas in batches of all that has arrived. Read a batch to its end before the next."""

    async def aclose(self) -> None: ...


@dataclass
class CollectedCall:
    call_id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass
class CollectedChoice:
    text: str = ""
    logprobs: list[TextLogprobs] = field(default_factory=list)
    finish_reason: AnswerEnd | None = None
    calls: list[CollectedCall] = field(default_factory=list)
    is_cut_in_call: bool = False
    thinking: str = ""


def add_call(calls: list[CollectedCall], delta: CallDelta) -> None:
    """Add a part of a call to the calls before it."""
    if delta.name is not None:
        calls.append(CollectedCall(delta.call_id, delta.name))
    calls[delta.index].arguments += delta.arguments
    calls[delta.index].is_complete = delta.is_last


async def collect(answer: Answer) -> list[CollectedChoice]:
    """Read `answer` to its end and return its choices."""
    parts: list[list[str]] = [[] for _ in range(answer.num_choices)]
    thoughts: list[list[str]] = [[] for _ in range(answer.num_choices)]
    choices = [CollectedChoice() for _ in range(answer.num_choices)]
    async for delta in answer:
        choice = choices[delta.choice_index]
        parts[delta.choice_index].append(delta.text)
        thoughts[delta.choice_index].append(delta.thinking)
        choice.logprobs.extend(delta.logprobs)
        for call in delta.calls:
            add_call(choice.calls, call)
        choice.finish_reason = delta.finish_reason or choice.finish_reason
        choice.is_cut_in_call = choice.is_cut_in_call or delta.is_cut_in_call
    for choice, texts, thinking in zip(choices, parts, thoughts, strict=True):
        choice.text, choice.thinking = "".join(texts), "".join(thinking)
    return choices
