"""Where does a text end that must not contain certain strings, when it arrives in pieces?"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, and holds back what might still become one.

    The match that is complete first wins, and of those that end together the longest: the result does not depend on
    how the text was cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(string for string in strings if string)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return what may leave now; after a match, nothing ever does."""
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
        """The text has ended: what was held back was no stop string after all."""
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released

    def _first_match(self) -> tuple[int, str] | None:
        found = [(start, string) for string in self._strings if (start := self._held.find(string)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _num_undecided(self) -> int:
        """Return the length of the longest ending of the held text that begins a stop string."""
        longest = min(len(self._held), max(len(string) for string in self._strings) - 1)
        endings = (length for length in range(longest, 0, -1))
        return next((n for n in endings if any(s.startswith(self._held[-n:]) for s in self._strings)), 0)
