"""Defines what the engine needs of a grammar's parser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tandem_engine.grammar import Grammar
from tandem_engine.ops.sampling import Words


class GrammarFailed(Exception):
    """This grammar cannot be used, or has no continuation; the message is for the caller of the request."""


class Matcher(Protocol):
    """The position of one answer in its grammar; it depends only on the grammar and the answer's tokens."""

    @property
    def builder(self) -> MaskBuilder | None:
        """Computes the masks of several such matchers at once; None: `masks` computes them."""
        ...

    def request_masks(self, new_tokens: list[int], draft_tokens: Sequence[int]) -> None:
        """Set the tokens that were sampled since the last call, and the drafts behind them."""
        ...

    def masks(self) -> Sequence[Words]:
        """Return the allowed tokens: one mask, and one behind each draft that the grammar allows.

        Drafts are not consumed. A mask has bit i % 32 of word i // 32 set for token i: int32 [ceil(vocab_size / 32)].
        It is valid until the next `request_masks`. End tokens are allowed if the grammar accepts the answer, and only
        they are allowed if the grammar accepts no more text. Raises GrammarFailed.
        """
        ...


class MaskBuilder(Protocol):
    """Computes masks in other threads."""

    def begin(self, matchers: Sequence[Matcher]) -> None:
        """Start to compute the requested masks; the matchers must not be used until `finish`."""
        ...

    def finish(self) -> None:
        """Wait until all masks are computed."""
        ...


MakeMatcher = Callable[[], Matcher]
"""Returns a matcher at the start of one grammar, in microseconds."""

Compile = Callable[[Grammar], MakeMatcher]
"""Compiles a grammar in up to some tens of ms, without the interpreter's lock; raises GrammarFailed."""
