"""Separates an answer into thinking and answer, while the text arrives in pieces.

    [whitespace opening] [lines] thinking [lines] closing [lines] answer

Line breaks around the marks belong to neither, as templates write them. The returned pieces, joined, do not depend on
how the text was cut.
"""

from __future__ import annotations

from typing import NamedTuple

from control_plane.text.thinking.forms import Begins, ThinkingForm


class Split(NamedTuple):
    thinking: str = ""
    answer: str = ""


class ThinkingSplitter:
    """Splits the text of one choice. Once `is_over`, all further text is the answer's."""

    def __init__(self, form: ThinkingForm, where: Begins) -> None:
        self._form = form
        self._where = where
        self._held = ""
        self._was_there = where == "thinking"
        self._has_thought = False
        """Whether text of the thinking was returned: line breaks before it are dropped."""
        self._is_behind = False
        """Whether the closing mark was read: line breaks behind it are dropped."""

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends within the thinking, or may still turn out to."""
        return self._where != "answer"

    @property
    def has_thought(self) -> bool:
        """Whether there was a thinking, if only an empty one."""
        return self._was_there

    @property
    def is_over(self) -> bool:
        """Whether the answer has begun."""
        return self._where == "answer" and not self._is_behind

    def push(self, text: str) -> Split:
        if self._where == "undecided":
            text = self._decided(text)
        if self._where == "thinking":
            return self._split(text)
        return Split(answer=self._begun(text)) if self._where == "answer" else Split()

    def flush(self) -> Split:
        """Return the held text at the end of the answer: it was not a mark."""
        held, self._held = self._held, ""
        return Split(answer=held) if self._where == "undecided" else Split(thinking=held)

    def _decided(self, text: str) -> str:
        """Decide by the first text that is no space; return the text behind the opening mark, or all of it."""
        text, self._held = self._held + text, ""
        first = text.lstrip()
        if first.startswith(self._form.opening):
            self._where, self._was_there = "thinking", True
            return first[len(self._form.opening) :]
        if self._form.opening.startswith(first):
            self._held = text
            return ""
        self._where = "answer"
        return text

    def _split(self, text: str) -> Split:
        text, self._held = self._held + text, ""
        if not self._has_thought:
            text = text.lstrip("\n")
        before, mark, behind = text.partition(self._form.closing)
        if mark:
            self._where, self._is_behind = "answer", True
            return Split(before.rstrip("\n"), self._begun(behind))
        num_certain = len(text) - num_that_may_begin(text, self._form.closing)
        certain = text[:num_certain].rstrip("\n")
        self._held = text[len(certain) :]
        self._has_thought = self._has_thought or bool(certain)
        return Split(certain)

    def _begun(self, text: str) -> str:
        if not self._is_behind:
            return text
        text = text.lstrip("\n")
        self._is_behind = not text
        return text


def num_that_may_begin(text: str, mark: str) -> int:
    """Return the length of the text's longest end that begins the mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)
