"""What does the simulated model compute?

The KV of a token is 8 bytes that depend on it and on every token before it, and the token that follows is read off the
last one: whoever attends to a wrong, stale or foreign byte would say another token.
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
    """Return the KV of a run of tokens from a request's beginning."""
    return _kv_of(tuple(token_ids))


@lru_cache(maxsize=4096)
def _kv_of(token_ids: tuple[int, ...]) -> bytes:
    state, content = _START, bytearray()
    for token_id in token_ids:
        state = xxhash.xxh3_64_intdigest(struct.pack("<I", token_id), seed=state)
        content += struct.pack("<Q", state)
    return bytes(content)


def token_after(kv: bytes) -> int:
    """Return the token that follows; `kv` is that of all tokens before it."""
    last: int = struct.unpack_from("<Q", kv, len(kv) - KV_BYTES)[0]
    return last % VOCABULARY


def answer_to(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return what an undisturbed run says."""
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(token_after(kv_of(token_ids)))
    return token_ids[len(prompt) :]
