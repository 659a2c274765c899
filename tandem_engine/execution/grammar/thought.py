"""Follows one answer's thinking: where it ends, and which token must come once it has its most tokens.

    [start] thinking ... end | answer, with its grammar

The state depends only on the answer's tokens, so another worker, or this one after a preemption, finds the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np

from tandem_engine.ops.sampling import Words
from tandem_engine.thinking import Thinking


class Thought:
    """The place of an answer in its thinking."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self.is_undecided = thinking.start_token_id is not None
        """Whether the first token, which decides, is still to come."""
        self.is_over = False
        self.num_tokens = 0
        """Of the answer, as far as it was followed: up to the first token after the thinking."""
        self._num_thought = 0
        self._end = thinking.end_token_ids
        self._forced = thinking.forced_token_ids or thinking.end_token_ids
        self._num_matched = self._num_forced = 0
        """Tokens of the end, and of what is forced, that the last tokens are."""

    def follow(self, token_ids: Iterable[int]) -> None:
        """Go on with more tokens of the answer, up to the end of the thinking."""
        for token_id in token_ids:
            if self.is_over:
                return
            self._follow(token_id)

    def rows(self, draft_tokens: Sequence[int]) -> tuple[list[Words | None], int | None]:
        """Return which tokens are allowed next and behind each draft (None: all), as long as the thinking goes on.

        The second value is the number of drafts behind which it is over; None if these drafts do not end it.
        """
        ahead, allowed = copy(self), list[Words | None]()
        for num_drafts in range(len(draft_tokens) + 1):
            if ahead.is_over:
                return allowed, num_drafts
            forced = ahead.forced_token_id
            allowed.append(None if forced is None else only(forced))
            if num_drafts == len(draft_tokens) or forced not in (None, draft_tokens[num_drafts]):
                break
            ahead.follow(draft_tokens[num_drafts : num_drafts + 1])
        return allowed, None

    @property
    def forced_token_id(self) -> int | None:
        """The only token that may come next; None: any token."""
        most = self._thinking.max_tokens
        if self.is_over or self.is_undecided or most is None or self._num_thought < most:
            return None
        # Before its first token there is nothing to close.
        return self._forced[self._num_forced] if self._num_thought else self._end[0]

    def _follow(self, token_id: int) -> None:
        if self.is_undecided:
            self.is_undecided = False
            self.is_over = token_id != self._thinking.start_token_id
            self.num_tokens += not self.is_over
            return
        self._num_matched = _matched(self._end, self._num_matched, token_id)
        self.is_over = self._num_matched == len(self._end)
        self._num_forced = 0 if self.is_over else _matched(self._forced, self._num_forced, token_id)
        self._num_thought += 1
        self.num_tokens += 1


def only(token_id: int) -> Words:
    """Return the mask that allows one token."""
    words = np.zeros(token_id // 32 + 1, np.uint32)
    words[-1] = 1 << token_id % 32
    return words.view(np.int32)


def with_token(mask: Words, token_id: int) -> Words:
    """Return a mask that allows one token more."""
    words = np.zeros(max(len(mask), token_id // 32 + 1), np.uint32)
    words[: len(mask)] = mask.view(np.uint32)
    words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.view(np.int32)


def _matched(mark: Sequence[int], num_matched: int, token_id: int) -> int:
    """Return how many tokens of a mark the last tokens are, after one more (Knuth, Morris, Pratt, 1977)."""
    while num_matched and mark[num_matched] != token_id:
        num_matched = _longest_border(mark[:num_matched])
    return num_matched + (mark[num_matched] == token_id)


def _longest_border(tokens: Sequence[int]) -> int:
    """Return the length of the longest proper beginning of `tokens` that is also its end."""
    return next((n for n in range(len(tokens) - 1, 0, -1) if tokens[:n] == tokens[-n:]), 0)
