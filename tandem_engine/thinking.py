"""Describes the thinking with which an answer begins."""

from __future__ import annotations

import msgspec

MAX_MARK_TOKENS = 32
"""Enough for the longest marks in a vocabulary of single bytes: gpt-oss's end of the thinking has 18 then."""


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer's tokens up to the end of its thinking: the grammar begins after them, and their number has a limit.

    Raises ValueError that names the field, its value and its limits.
    """

    end_token_ids: tuple[int, ...]
    """Behind these tokens the thinking is over."""
    forced_token_ids: tuple[int, ...] = ()
    """What follows once the thinking has `max_tokens`; it ends with `end_token_ids`, which it is if empty."""
    start_token_id: int | None = None
    """If the answer's first token is another one, there is no thinking. None: the prompt ends within the thinking."""
    max_tokens: int | None = None
    """Tokens between start and end; None: no limit. With 0, the end is forced at once."""

    def __post_init__(self) -> None:
        if not 0 < len(self.end_token_ids) <= MAX_MARK_TOKENS:
            raise ValueError(
                f"thinking.end_token_ids has {len(self.end_token_ids)} tokens, must have 1 to {MAX_MARK_TOKENS}"
            )
        if len(self.forced_token_ids) > MAX_MARK_TOKENS or (
            self.forced_token_ids and self.forced_token_ids[-len(self.end_token_ids) :] != self.end_token_ids
        ):
            raise ValueError(
                f"thinking.forced_token_ids has {len(self.forced_token_ids)} tokens, must have {MAX_MARK_TOKENS} at "
                "the most, and end_token_ids at its end"
            )
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ValueError(f"thinking.max_tokens is {self.max_tokens}, must be 0 or more")
