"""Encodes long texts piece by piece: memory is bounded by a piece, and the ids are those of the whole text.

The tokenizers library takes about 150 bytes of memory per byte of a text that it encodes at once.
"""

from __future__ import annotations

import resource
from array import array
from collections.abc import Iterator
from functools import cached_property

from tokenizers import Tokenizer

from control_plane.generation import TokenIds
from control_plane.text.seams import Seam, seams_of
from tandem_machine.own_memory import data_bytes

PIECE_CHARACTERS = 16 * 1024
_LONG_CHARACTERS = 1 << 18
_LEAST_BYTES_PER_CHARACTER = 64
"""Of memory while a text is encoded at once, at least: less than half of what is usual."""
_LOOK_AHEAD = 3
"""Characters behind a window in which a seam is searched."""


class PieceEncoder:
    """Encodes with one tokenizer. A text without seams, or one of a tokenizer without, is encoded whole."""

    def __init__(self, tokenizer: Tokenizer, piece_characters: int = PIECE_CHARACTERS) -> None:
        """`piece_characters` is the least length of a piece; it ends at the first seam behind."""
        self._tokenizer = tokenizer
        self._piece_characters = piece_characters
        self.seams = seams_of(tokenizer)
        self._leads = {seam.name: array("I", self._whole(seam.lead)) for seam in self.seams}

    def ids(self, text: str, *, add_special_tokens: bool = False) -> TokenIds:
        """Return the ids of a text. `add_special_tokens`: with those that the tokenizer's template adds to a prompt."""
        if len(text) <= self._piece_characters or not self.seams:
            return TokenIds(self._whole(text, add_special_tokens))
        before, after = self._template if add_special_tokens else (_NONE, _NONE)
        if before is None or after is None:
            return TokenIds(self._whole(text, add_special_tokens))
        ids = array("I", before)
        for seam, piece in self._pieces(text):
            ids.extend(self._piece(seam, piece))
        ids.extend(after)
        return TokenIds(ids)

    def _pieces(self, text: str) -> Iterator[tuple[Seam | None, str]]:
        """Yield each piece with the seam that it begins at; None for the first one."""
        start, seam = 0, None
        while (found := self._next_seam(text, start + self._piece_characters)) is not None:
            next_seam, end = found
            yield seam, text[start:end]
            start, seam = end, next_seam
        yield seam, text[start:]

    def _next_seam(self, text: str, start: int) -> tuple[Seam, int] | None:
        for low in range(start, len(text), self._piece_characters):  # a window each, since a kind may occur nowhere
            for seam in self.seams:
                found = seam.pattern.search(text, low, low + self._piece_characters + _LOOK_AHEAD)
                if found is not None:
                    return seam, found.end()
        return None

    def _piece(self, seam: Seam | None, piece: str) -> array[int]:
        if seam is None:
            return array("I", self._whole(piece))
        lead = self._leads[seam.name]
        ids = array("I", self._whole(seam.lead + piece))
        assert ids[: len(lead)] == lead, "no token reaches across a seam"
        return ids[len(lead) :]

    @cached_property
    def _template(self) -> tuple[array[int] | None, array[int] | None]:
        """The special tokens before and after a prompt; None if the template does more than that."""
        text = self.seams[0].lead
        ids, bare = array("I", self._whole(text, True)), array("I", self._whole(text))
        places = [place for place in range(len(ids)) if ids[place : place + len(bare)] == bare]
        mask = self._tokenizer.encode(text).special_tokens_mask
        for place in places:
            end = place + len(bare)
            if bare and mask == [*[1] * place, *[0] * len(bare), *[1] * (len(ids) - end)]:
                return ids[:place], ids[end:]
        return None, None

    def _whole(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode without the offsets of tokens; a batch of one, since that gives up the interpreter lock.

        Raises MemoryError for a text that cannot fit what this process may use: the library would end the process.
        """
        if len(text) >= _LONG_CHARACTERS:
            _check_room(_LEAST_BYTES_PER_CHARACTER * len(text))
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids


def _check_room(num_bytes: int) -> None:
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit_bytes == resource.RLIM_INFINITY:
        return
    if data_bytes() + num_bytes > limit_bytes:
        raise MemoryError(f"to encode a text takes {num_bytes:,} bytes at least")


_NONE: array[int] = array("I")
