"""The simulated model.

The KV of a token is 8 bytes that depend on the token and on every token before it. The next token is derived from the
last KV, so a wrong, stale or foreign byte changes the output.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import xxhash

TOKENS_PER_BLOCK = 4
KV_BYTES = 8
BLOCK_BYTES = TOKENS_PER_BLOCK * KV_BYTES
VOCABULARY = 97
_START = 0x54616E64656D


def kv_of(token_ids: Sequence[int]) -> bytes:
    """Return the KV of a request's leading tokens."""
    return _kv_of(tuple(token_ids))


@lru_cache(maxsize=4096)
def _kv_of(token_ids: tuple[int, ...]) -> bytes:
    state, content = _START, bytearray()
    for token_id in token_ids:
        state = xxhash.xxh3_64_intdigest(struct.pack("<I", token_id), seed=state)
        content += struct.pack("<Q", state)
    return bytes(content)


def token_after(kv: bytes) -> int:
    """Return the next token; `kv` is the KV of all tokens before it."""
    last: int = struct.unpack_from("<Q", kv, len(kv) - KV_BYTES)[0]
    return last % VOCABULARY


def answer_to(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the output of an undisturbed run."""
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(token_after(kv_of(token_ids)))
    return token_ids[len(prompt) :]
