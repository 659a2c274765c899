"""The decoding half of a tokenizer: all that turns token ids into text, without what turns text into ids.

Loading a `tokenizer.json` of a few megabytes holds the interpreter lock for a second or more, also in a thread. A
vocabulary is loaded in milliseconds, so a gateway holds vocabularies, and its text processes hold tokenizers.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from control_plane.text.detokenizer import ByteLevelDetokenizer, Detokenizer, NamingDetokenizer, WindowDetokenizer
from tandem_runtime.errors import InternalError

MAX_TOKEN_ID = 1 << 22
"""Above every known vocabulary; a file with one huge id must not cost gigabytes."""

_MAX_ABSENT = 65_536
"""Each costs memory in the gateway's own process; known vocabularies lack some hundreds."""

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + position): byte for position, byte in enumerate(_OTHERS)
}
"""Byte-level BPE writes each byte as one visible character (Radford et al., 2019, GPT-2)."""


class VocabularyData(msgspec.Struct, frozen=True):
    """A vocabulary in a form that passes between processes. Token `i` is `tokens[ends[i - 1]:ends[i]]`, UTF-8."""

    tokens: bytes
    ends: bytes
    """Four bytes each, in the machine's order."""
    absent: tuple[int, ...]
    """Ids below the largest one that no token has."""
    control_ids: dict[str, int]
    """Special tokens by name."""
    decoder: str
    """The decoder of tokenizer.json as JSON; "" for none."""


def vocabulary_of(tokenizer: Tokenizer) -> VocabularyData:
    """Return the vocabulary of a loaded tokenizer. Raise InternalError for an id above 4,194,304, or a sparse one."""
    num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if num_ids > MAX_TOKEN_ID:
        raise InternalError(f"a token has the id {num_ids - 1:,}, the largest accepted one is {MAX_TOKEN_ID - 1:,}")
    names = [tokenizer.id_to_token(token_id) for token_id in range(num_ids)]
    encoded = [(name or "").encode() for name in names]
    absent = tuple(token_id for token_id, name in enumerate(names) if name is None)
    if len(absent) > _MAX_ABSENT:
        raise InternalError(f"{len(absent):,} ids below {num_ids:,} have no token, at most {_MAX_ABSENT:,} may")
    added = tokenizer.get_added_tokens_decoder()
    return VocabularyData(
        b"".join(encoded),
        array("I", _running_sums(map(len, encoded))).tobytes(),
        absent,
        {token.content: token_id for token_id, token in added.items() if token.special},
        "" if tokenizer.decoder is None else tokenizer.decoder.__getstate__().decode(),
    )


def _running_sums(numbers: Iterator[int]) -> Iterator[int]:
    total = 0
    for number in numbers:
        total += number
        yield total


class Vocabulary:
    """Decodes token ids exactly as the tokenizer does that it was made from."""

    def __init__(self, data: VocabularyData) -> None:
        self._tokens = data.tokens
        self._ends = array("I", data.ends)
        self._absent = frozenset(data.absent)
        self.control_ids = data.control_ids
        self._special_ids = frozenset(data.control_ids.values())
        self._decoder = _decoder(data.decoder)
        self._bytes = TokenBytes(self.id_to_token, decoder_kinds(data.decoder))

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token as the file writes it; None for an id without a token."""
        if not 0 <= token_id < len(self._ends) or token_id in self._absent:
            return None
        start = self._ends[token_id - 1] if token_id else 0
        return self._tokens[start : self._ends[token_id]].decode()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        tokens = [
            token
            for token_id in token_ids
            if (token := self.id_to_token(token_id)) is not None
            and not (skip_special_tokens and token in self.control_ids)
        ]
        return " ".join(tokens) if self._decoder is None else str(self._decoder.decode(tokens))

    def detokenizer(self, context_ids: Sequence[int] = (), shown: Collection[int] = ()) -> Detokenizer:
        """Return a new detokenizer for the tokens after `context_ids`.

        `shown` are control tokens whose names become part of the text.
        """
        if shown:
            names = {token_id: name for name, token_id in self.control_ids.items() if token_id in shown}
            return NamingDetokenizer(self.detokenizer, names, context_ids)
        if self._bytes.is_byte_level:
            return ByteLevelDetokenizer(self._visible_bytes)
        return WindowDetokenizer(self.decode, context_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, or the name of a special token, as logprobs show them."""
        return self._bytes[token_id]

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self._bytes[token_id]


class TokenBytes:
    """The bytes of tokens, as the tokenizer's own decoder joins them. Caches the tokens that were requested."""

    def __init__(self, id_to_token: Callable[[int], str | None], kinds: Sequence[str]) -> None:
        """`kinds` are the type names of the tokenizer's decoders."""
        self._id_to_token = id_to_token
        self._kinds = tuple(kinds)
        self._known: dict[int, bytes] = {}

    @property
    def is_byte_level(self) -> bool:
        """Whether the decoding of a text is the concatenation of its tokens' bytes."""
        return self._kinds == ("ByteLevel",)

    def __getitem__(self, token_id: int) -> bytes:
        if token_id not in self._known:
            self._known[token_id] = self._of(self._id_to_token(token_id))
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


def decoder_kinds(decoder: str) -> list[str]:
    """Return the type names of a decoder's parts, in order."""
    if not decoder:
        return []
    state: dict[str, Any] = json.loads(decoder)
    return [part["type"] for part in state.get("decoders", [state])]


def _decoder(decoder: str) -> Any:
    """Return the library's decoder, taken from a tokenizer without a vocabulary; None for none."""
    if not decoder:
        return None
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}}
    return Tokenizer.from_str(json.dumps({**empty, "decoder": json.loads(decoder)})).decoder
