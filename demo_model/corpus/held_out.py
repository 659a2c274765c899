"""The graded questions: their phrasings and their values never occur in training, their answers are exact."""

from dataclasses import dataclass
from random import Random

from demo_model.corpus.mixture import FAMILIES
from demo_model.corpus.sample import Message, Sample, Tool
from demo_model.corpus.split import Split

GRADED_FAMILIES = tuple(family for family in FAMILIES if family != "stories")
"""A story has no one right answer, so stories are read, not graded."""


@dataclass(frozen=True)
class GradedItem:
    """One graded question: the chat up to the answer, and the answer, word for word."""

    family: str
    template: str
    values: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    expected: str

    @property
    def question(self) -> str:
        """Return what the user said last."""
        return next(message.content for message in reversed(self.messages) if message.role == "user")


def _graded(sample: Sample) -> GradedItem:
    *chat, answer = sample.messages
    return GradedItem(sample.family, sample.template, sample.values, tuple(chat), sample.tools, answer.content)


def held_out(per_family: int = 300, seed: int = 0) -> tuple[GradedItem, ...]:
    """Return `per_family` different graded questions of every graded family, always the same ones for a seed."""
    items: dict[tuple[str, tuple[Message, ...], tuple[str, ...]], GradedItem] = {}
    for family in GRADED_FAMILIES:
        random = Random(f"held out {seed} {family}")
        wanted = len(items) + per_family
        while len(items) < wanted:
            item = _graded(FAMILIES[family](random, Split.HELD_OUT))
            items.setdefault((family, item.messages, tuple(str(tool) for tool in item.tools)), item)
    return tuple(items.values())
