"""How does text grow token by token without ever showing half a character?"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8


class Detokenizer(Protocol):
    """The pieces returned, joined, are what decoding all tokens at once gives, special tokens left out."""

    def push(self, token_id: int) -> str:
        """Return the text that is certain now, "" while a character is incomplete."""

    def flush(self) -> str:
        """Return what is left at the end; incomplete characters become U+FFFD."""


class ByteLevelDetokenizer:
    """For byte-level BPE: the text is the UTF-8 decoding of the tokens' bytes, so one decoder with state is enough."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes` gives b"" for special tokens."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other decoder: what a token adds is how the decoding of a short window grows.

    The window always begins with tokens whose text has left already, because decoders treat the first token of a
    sequence differently (a leading space is dropped).

        ids:  ... | emitted before | not yet emitted |
                  ^0               ^_num_emitted     ^end
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context_ids: Sequence[int] = ()) -> None:
        """`context_ids` are the tokens before the first one pushed, whose text belongs to somebody else."""
        self._decode = decode
        self._window = list(context_ids[-_CONTEXT_TOKENS:])
        self._num_emitted = len(self._window)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        return "" if text.endswith(REPLACEMENT) else self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        new = text[len(self._decode(self._window[: self._num_emitted])) :]
        if new:  # a window of tokens without text would make the next one look like the first of all
            del self._window[: self._num_emitted]
            self._num_emitted = len(self._window)
        return new


class NamingDetokenizer:
    """Shows some control tokens by name; what is between them another detokenizer does."""

    def __init__(
        self, make: Callable[[Sequence[int]], Detokenizer], names: Mapping[int, str], context_ids: Sequence[int] = ()
    ) -> None:
        """`make` gives the detokenizer of what follows the tokens that it is told."""
        self._make = make
        self._names = names
        self._inner = make(context_ids)

    def push(self, token_id: int) -> str:
        name = self._names.get(token_id)
        if name is None:
            return self._inner.push(token_id)
        text = self._inner.flush() + name
        self._inner = self._make(())
        return text

    def flush(self) -> str:
        return self._inner.flush()
