"""Ends a text before the first of some strings, while the text arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Releases text up to the first stop string, and holds back text that may become a stop string.

    The match that ends first wins; of matches that end together, the longest. So the result does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(string for string in strings if string)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text and return what is certain now; "" after a match."""
        if self.matched is not None:
            return ""
        if not self._strings:
            return text
        self._held += text
        match = self._first_match()
        if match is not None:
            start, self.matched = match
            released, self._held = self._held[:start], ""
            return released
        return self._release(len(self._held) - self._num_undecided())

    def flush(self) -> str:
        """Return the held text at the end of the answer."""
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released

    def _first_match(self) -> tuple[int, str] | None:
        found = [(start, string) for string in self._strings if (start := self._held.find(string)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _num_undecided(self) -> int:
        """Return the length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = min(len(self._held), max(len(string) for string in self._strings) - 1)
        endings = (length for length in range(longest, 0, -1))
        return next((n for n in endings if any(s.startswith(self._held[-n:]) for s in self._strings)), 0)
