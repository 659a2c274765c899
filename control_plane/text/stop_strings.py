"""Ends a text before the first of some strings, while the text arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Releases text up to the first stop string, and holds back text that may become a stop string.

    The match that ends first wins; of matches that end together, the longest. So the result does not depend on how
    the text was cut into pieces. The work is linear in the text (Knuth, Morris, Pratt, 1977).
    """

    def __init__(self, strings: Sequence[str]) -> None:
        # Longest first: of the matches that end at one character, the longest is found first.
        self._patterns = [_Pattern(string) for string in sorted(filter(None, strings), key=len, reverse=True)]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text and return what is certain now; "" after a match."""
        if self.matched is not None:
            return ""
        if not self._patterns:
            return text
        num_before = len(self._held)
        self._held += text
        for position, character in enumerate(text, start=num_before + 1):
            self._take(character)
            if self.matched is not None:
                released, self._held = self._held[: position - len(self.matched)], ""
                return released
        return self._release(len(self._held) - max(pattern.num_matched for pattern in self._patterns))

    def flush(self) -> str:
        """Return the held text at the end of the answer."""
        return self._release(len(self._held))

    def _take(self, character: str) -> None:
        for pattern in self._patterns:
            if pattern.take(character) and self.matched is None:
                self.matched = pattern.string

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released


class _Pattern:
    """One stop string, and how many of its characters the text ends with."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        self._borders = _borders(string)

    def take(self, character: str) -> bool:
        """Add a character of the text. Return whether the text ends with the string."""
        num = self.num_matched
        while num and self.string[num] != character:
            num = self._borders[num - 1]
        if self.string[num] == character:
            num += 1
        self.num_matched = num
        return num == len(self.string)


@lru_cache(maxsize=64)
def _borders(string: str) -> tuple[int, ...]:
    """Return for each prefix of the string the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for position in range(1, len(string)):
        while length and string[position] != string[length]:
            length = borders[length - 1]
        if string[position] == string[length]:
            length += 1
        borders[position] = length
    return tuple(borders)
