"""What does the engine ask of a grammar's parser?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.ops.sampling import Words
from engine.scheduling.grammar import Grammar


class GrammarFailed(Exception):
    """This grammar cannot be used, or has no way on from the tokens so far; the message is for its caller."""


class Matcher(Protocol):
    """Where one answer stands in its grammar: a function of the grammar and the answer's tokens, and nothing else."""

    def masks(self, answer: Sequence[int], draft_tokens: Sequence[int]) -> list[Words]:
        """Return the tokens that may follow `answer`, and those behind each of the drafts that the grammar allows.

        A mask has bit i % 32 of word i // 32 set for token i: int32 [ceil(vocab_size / 32)]. The end of the answer is
        allowed where the grammar accepts it as it stands, and nothing else where it takes no more. Calls must come with
        ever longer answers, each beginning with the one before. Raises GrammarFailed.
        """
        ...


class MakeMatcher(Protocol):
    def __call__(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the grammar's beginning; raises GrammarFailed."""
        ...
