"""Holds out phrasings and values for grading; a hash alone decides, before training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from random import Random
from typing import TypeVar

_HELD_OUT_ONE_IN = 10

T = TypeVar("T")


class Split(Enum):
    """The two disjoint halves: training and grading."""

    TRAINING = "training"
    HELD_OUT = "held out"


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def values_are_held_out(values: str) -> bool:
    """Return whether these values (an operand pair, a text to copy) are kept for grading."""
    return _digest(values) % _HELD_OUT_ONE_IN == 0


def draw(random: Random, split: Split, make: Callable[[Random], T], key: Callable[[T], str] = str) -> T:
    """Draw values until they fall on the wanted side of the split."""
    while True:
        drawn = make(random)
        if values_are_held_out(key(drawn)) == (split is Split.HELD_OUT):
            return drawn


@dataclass(frozen=True)
class Phrasing:
    """One way to say something: its name in the split, and its text with `{fields}` to fill."""

    name: str
    text: str


class Phrasings:
    """The ways to say one thing, divided once: some for training, the rest only for grading.

    The first `num_common` are what most people say; they are always trained on, so that the model is of use. Of the
    others a hash picks those held out. Phrasings may be added to a model in training: at worst one that was held out
    comes to be trained on. Taking one away may hold out another that the model has seen: then train from the start.
    """

    def __init__(self, subject: str, texts: Sequence[str], num_held_out: int = 2, num_common: int = 3) -> None:
        if len(set(texts)) != len(texts):
            raise ValueError(f"phrasings of {subject!r} repeat one another")
        if len(texts) < num_common + num_held_out + 1:
            raise ValueError(f"{subject!r} has {len(texts)} phrasings, too few to hold out {num_held_out}")
        ranked = sorted(texts[num_common:], key=lambda text: _digest(f"{subject}/{text}"))
        self.held_out = tuple(Phrasing(f"{subject}/{text}", text) for text in ranked[:num_held_out])
        kept = (*texts[:num_common], *ranked[num_held_out:])
        self.training = tuple(Phrasing(f"{subject}/{text}", text) for text in kept)

    def choose(self, random: Random, split: Split) -> Phrasing:
        """Choose a phrasing of the wanted side."""
        return random.choice(self.held_out if split is Split.HELD_OUT else self.training)
