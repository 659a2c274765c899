"""Where did the last tokens of one text stand in another, or earlier in the same, and what followed there?"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

MOST_AGREED = 16
"""Tokens before a guess that are compared; more of them say no more."""
CHANGED, UNSEEN, FIRM = 0, 1, 2
"""What followed a pair of tokens is not what followed the same pair before; there was none before; it is the same."""
_NUM_CANDIDATES = 4
_NO_TOKEN = -1  # before the first: no context ends so
_NUM_BYTES = array("I").itemsize


class Match(NamedTuple):
    """A place in a text that reads like the end of a context."""

    end: int
    """What follows the place begins here."""
    num_agreed: int
    """Tokens in a row that are the same before both, from 1 to MOST_AGREED."""


class TokenBytes:
    """A text that grows, searched from its end as bytes: some ns per token, and nothing to be made ready before."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def find(self, text: Sequence[int]) -> Match | None:
        """Return the place in `text`, which has only grown, that agrees longest with its end, of the latest few."""
        data = self._bytes
        data += array("I", text[len(data) // _NUM_BYTES :]).tobytes()
        for size in (3 * _NUM_BYTES, 2 * _NUM_BYTES, _NUM_BYTES):
            end = data[-size:]
            best, most, before = 0, 0, len(data) - 1
            for _ in range(_NUM_CANDIDATES):
                at = data.rfind(end, 0, before)
                if at < 0 or most == MOST_AGREED:
                    break
                before = at + size - 1
                if at % _NUM_BYTES == 0 and (num_agreed := _num_agreed_bytes(data, at + size)) > most:
                    best, most = (at + size) // _NUM_BYTES, num_agreed
            if most:
                return Match(best, most)
        return None


class NGramIndex:
    """Where each run of one, two and three tokens ended last; of those of three some earlier places, too.

    The text itself is the caller's: a list that only grows.
    """

    def __init__(self) -> None:
        self.num_indexed = 0
        self.firmness = bytearray([UNSEEN])
        """By place: CHANGED, UNSEEN or FIRM, of the token that follows the pair that ends there."""
        self._singles: dict[int, int] = {}
        self._pairs: dict[int, int] = {}
        self._triples: dict[int, int] = {}
        self._earlier: dict[int, int] = {}
        """Where a triple ended, and where the same one did before."""

    def extend(self, text: Sequence[int], end: int) -> None:
        """Take in what ends at the first `end` places of `text`, which has one token more at least."""
        singles, pairs, triples, firmness = self._singles, self._pairs, self._triples, self.firmness
        first = self.num_indexed
        if end <= first:
            return
        before, last = (text[first - 2] if first > 1 else _NO_TOKEN), (text[first - 1] if first else _NO_TOKEN)
        for place in range(first + 1, end + 1):
            token_id = text[place - 1]
            pair = last << 20 | token_id
            triple = before << 40 | pair
            seen = pairs.get(pair)
            firmness.append(UNSEEN if seen is None else FIRM if text[seen] == text[place] else CHANGED)
            if triple in triples:
                self._earlier[place] = triples[triple]
            singles[token_id] = pairs[pair] = triples[triple] = place
            before, last = last, token_id
        self.num_indexed = end

    def find(self, text: Sequence[int], context: Sequence[int]) -> Match | None:
        """Return the place whose tokens before it agree longest with the last ones of `context`, of the latest few."""
        if len(context) < 3:
            return None
        last = context[-1]
        pair = context[-2] << 20 | last
        best, most = None, 0
        place = self._triples.get(context[-3] << 40 | pair)
        for _ in range(_NUM_CANDIDATES):
            if place is None or most == MOST_AGREED:
                break
            if (num_agreed := _num_agreed(text, place, context)) > most:
                best, most = place, num_agreed
            place = self._earlier.get(place)
        if best is None:
            best = self._pairs.get(pair, self._singles.get(last))
            most = 0 if best is None else _num_agreed(text, best, context)
        return Match(best, most) if best is not None and most else None


def _num_agreed_bytes(data: bytearray, end: int) -> int:
    """Count the last tokens before `end`, a place in bytes, that are also the last ones of `data`."""
    size = min(MOST_AGREED * _NUM_BYTES, end)
    ours, others = int.from_bytes(data[end - size : end], "little"), int.from_bytes(data[-size:], "little")
    return (8 * size - (ours ^ others).bit_length()) // (8 * _NUM_BYTES)  # the last token is in the highest bits


def _num_agreed(text: Sequence[int], end: int, context: Sequence[int]) -> int:
    """Count the last tokens before `end` that are also the last ones of `context`."""
    if end >= MOST_AGREED and text[end - MOST_AGREED : end] == context[-MOST_AGREED:]:
        return MOST_AGREED
    num_agreed, most = 0, min(MOST_AGREED, end, len(context))
    while num_agreed < most and text[end - 1 - num_agreed] == context[-1 - num_agreed]:
        num_agreed += 1
    return num_agreed
