"""What does the engine ask of a grammar's parser?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tandem_engine.ops.sampling import Words
from tandem_engine.scheduling.grammar import Grammar


class GrammarFailed(Exception):
    """This grammar cannot be used, or has no way on from the tokens so far; the message is for its caller."""


class Matcher(Protocol):
    """Where one answer stands in its grammar: a function of the grammar and the answer's tokens, and nothing else."""

    @property
    def crew(self) -> Crew | None:
        """Who makes the masks of several such matchers at once; None: each its own, when they are taken."""
        ...

    def ask(self, new_tokens: list[int], draft_tokens: Sequence[int]) -> None:
        """Say which tokens came since the last call, and which may follow them."""
        ...

    def masks(self) -> Sequence[Words]:
        """Return which tokens may follow: one mask, and one behind each of the drafts that the grammar allows.

        Drafts are not taken in. A mask has bit i % 32 of word i // 32 set for token i: int32 [ceil(vocab_size / 32)];
        it is good until the next `ask`. The end of the answer is allowed where the grammar accepts it as it stands,
        and nothing else where it takes no more. Raises GrammarFailed.
        """
        ...


class Crew(Protocol):
    """Makes masks beside what its caller does."""

    def begin(self, matchers: Sequence[Matcher]) -> None:
        """Begin what they were asked for; they are asked for nothing else until `finish`."""
        ...

    def finish(self) -> None:
        """Return when all of it is made."""
        ...


MakeMatcher = Callable[[], Matcher]
"""Returns a matcher at the beginning of one grammar, in microseconds."""

Compile = Callable[[Grammar], MakeMatcher]
"""Takes up to some tens of milliseconds, without the interpreter's lock; raises GrammarFailed."""
