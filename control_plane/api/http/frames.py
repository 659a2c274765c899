"""How do objects become events of a stream, and those that differ in nothing but a text at little cost?"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
_CHARACTERS = string.ascii_lowercase + string.digits
ALL_FILLERS = tuple(_CHARACTERS[:length] for length in range(1, len(_CHARACTERS) + 1))
_MARK = secrets.token_hex(16)
"""Stands where the text goes; in no name that anybody could have given."""
_RANDOM_BYTES = 4096

_encode = msgspec.json.Encoder().encode


def frame(event: Any) -> bytes:
    """Return an event that has a JSON object as its data."""
    return b"data: " + _encode(event) + b"\n\n"


class TextFrames:
    """Makes frames of one kind of object, in which only a text changes."""

    def __init__(self, event_with: Callable[[str], Any]) -> None:
        """`event_with` returns the object that has a text; it is called once."""
        self._before, _, self._after = frame(event_with(_MARK)).partition(_encode(_MARK))

    def frame(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


class Fillers:
    """Fillers of 1 to 36 characters: an eavesdropper on TLS sees lengths, and lengths give tokens away.

    From the system's random numbers, asked for some thousand at a time.
    """

    def __init__(self) -> None:
        self._random = b""
        self._place = 0

    def next(self) -> str:
        while True:
            if self._place == len(self._random):
                self._random, self._place = secrets.token_bytes(_RANDOM_BYTES), 0
            byte = self._random[self._place]
            self._place += 1
            if byte < 252:  # a multiple of their number: every length is as likely
                return ALL_FILLERS[byte % len(ALL_FILLERS)]


FILLERS = Fillers()
