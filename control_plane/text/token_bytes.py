"""Which bytes does one token stand for?"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + position): byte for position, byte in enumerate(_OTHERS)
}
"""Byte-level BPE writes each byte as one visible character (Radford et al., 2019, GPT-2)."""


class TokenBytes:
    """The bytes of tokens as the tokenizer's own decoder would join them; remembers those it was asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kinds = _decoder_kinds(tokenizer)
        self._known: dict[int, bytes] = {}

    @property
    def is_byte_level(self) -> bool:
        """Whether decoding a text is nothing but joining its tokens' bytes."""
        return self._kinds == ["ByteLevel"]

    def __getitem__(self, token_id: int) -> bytes:
        if token_id not in self._known:
            self._known[token_id] = self._of(self._tokenizer.id_to_token(token_id))
        return self._known[token_id]

    def _of(self, token: str | None) -> bytes:
        if token is None:  # embeddings are often padded beyond the vocabulary
            return b""
        if "ByteLevel" in self._kinds:
            bytes_ = [_BYTE_OF_CHARACTER.get(character) for character in token]
            known = [byte for byte in bytes_ if byte is not None]
            return bytes(known) if len(known) == len(bytes_) else token.encode()
        if "ByteFallback" in self._kinds and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """Return the type names of the tokenizer's decoders, in order."""
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]
