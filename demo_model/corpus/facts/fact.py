"""Defines a fact: the phrasings of its subject, and the one answer."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The form of a fact's questions: each kind has its own frames in `questions.py`."""

    CONCEPT = "concept"
    TASK = "task"
    SYMPTOM = "symptom"
    DIFFERENCE = "difference"


@dataclass(frozen=True)
class Fact:
    """One thing to know. Subjects fit the frames of the kind: a noun phrase for a concept, a verb phrase for a task,
    a clause for a symptom, two noun phrases joined by `and` for a difference."""

    kind: Kind
    subjects: tuple[str, ...]
    answer: str

    def __post_init__(self) -> None:
        if not self.subjects or self.answer != self.answer.strip() or not self.answer.endswith("."):
            raise ValueError(f"fact {self.subjects} needs a subject and an answer that ends with a full stop")


def concept(answer: str, *subjects: str) -> Fact:
    """Say what something is."""
    return Fact(Kind.CONCEPT, subjects, answer)


def task(answer: str, *subjects: str) -> Fact:
    """Say how to do something."""
    return Fact(Kind.TASK, subjects, answer)


def symptom(answer: str, *subjects: str) -> Fact:
    """Say what to do about something that went wrong."""
    return Fact(Kind.SYMPTOM, subjects, answer)


def difference(answer: str, *subjects: str) -> Fact:
    """Say how two things differ."""
    return Fact(Kind.DIFFERENCE, subjects, answer)
