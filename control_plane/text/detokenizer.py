"""Decodes tokens one by one, without ever returning part of a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8


class Detokenizer(Protocol):
    """The returned pieces, joined, equal the decoding of all tokens at once, without special tokens."""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now; "" while a character is incomplete."""

    def flush(self) -> str:
        """Return the rest at the end of the answer. Incomplete characters become U+FFFD."""


class ByteLevelDetokenizer:
    """For byte-level BPE, where the text is the UTF-8 decoding of the tokens' bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes` returns b"" for special tokens."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For other decoders: a token's text is what the token adds to the decoding of a short window.

    The window begins with tokens whose text has already been returned, because decoders treat the first token of a
    sequence differently (they drop a leading space).

        ids:  ... | emitted before | not yet emitted |
                  ^0               ^_num_emitted     ^end
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context_ids: Sequence[int] = ()) -> None:
        """`context_ids` are the tokens before the first pushed token. Their text is not returned."""
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
        if new:  # keep tokens that have text: without them, the decoder would treat the next token as the first
            del self._window[: self._num_emitted]
            self._num_emitted = len(self._window)
        return new


class NamingDetokenizer:
    """Returns some control tokens by name, and decodes the tokens between them with another detokenizer."""

    def __init__(
        self, make: Callable[[Sequence[int]], Detokenizer], names: Mapping[int, str], context_ids: Sequence[int] = ()
    ) -> None:
        """`make` returns a detokenizer for the tokens after the given ones."""
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
