"""What does the engine ask of a grammar's parser?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.ops.sampling import Words
from engine.scheduling.grammar import Grammar


class GrammarFailed(Exception):
    """This grammar cannot be used, or has no way on from the tokens so far; the message is for its caller."""


class Matcher(Protocol):
    """Where one answer stands in its grammar: a function of the grammar and the answer's tokens, and nothing else."""

    def masks(self, new_tokens: list[int], draft_tokens: Sequence[int]) -> list[Words]:
        """Take in the tokens that came since the last call, and return which may follow.

        The masks are one, and one behind each of the drafts that the grammar allows; drafts are not taken in. A mask
        has bit i % 32 of word i // 32 set for token i: int32 [ceil(vocab_size / 32)]. The end of the answer is allowed
        where the grammar accepts it as it stands, and nothing else where it takes no more. Raises GrammarFailed.
        """
        ...


MakeMatcher = Callable[[], Matcher]
"""Returns a matcher at the beginning of one grammar, in microseconds."""

Compile = Callable[[Grammar], MakeMatcher]
"""Takes up to some tens of milliseconds, without the interpreter's lock; raises GrammarFailed."""
