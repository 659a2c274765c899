"""Computes the hash that identifies a KV block.

The hash covers everything that decides the block's content: a root of model and tenant, and a chain of all tokens up to
the block's end. Root and chain are BLAKE2b (RFC 7693) cut to 128 bits: with a non-cryptographic hash one tenant could
find another's blocks. Gateways hash prompts, and decode workers extend the chain, with these functions.

The chain has one hash per grain, a fixed number of tokens; a block is a multiple of it and has the hash at its end. A
worker finds the block by its key, `hash XOR space`: the space names the workers that may share blocks.

    hashes   h0   h1 | h2   h3 | h4    a grain each; h4 lies in a block that is not full yet
    keys     h1 XOR s | h3 XOR s |     the next key continues from h4, not from h3: see `HashChain`
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes."""

NUM_HASH_BYTES = 16
_VERSION = 1
_MAX_ROOTS = 4096  # that are kept: one per model, tenant and salt


@lru_cache(maxsize=_MAX_ROOTS)
def hash_root(fingerprint: bytes, block_size: int, lora: str = "", salt: bytes = b"") -> BlockHash:
    """Return the root of all chains of one model and one tenant.

    The fields are length-prefixed, so two different tuples never have the same bytes.
    """
    digest = blake2b(bytes([_VERSION]), digest_size=NUM_HASH_BYTES, person=b"tandem-root")
    for part in (fingerprint, struct.pack("<I", block_size), lora.encode(), salt):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return BlockHash(digest.digest())


def next_block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of the block that holds `token_ids` after `parent` (the root, before the first block)."""
    return _next(parent, _little_endian_uint32(token_ids))


def hash_blocks(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Return the hashes of the full blocks of `token_ids`; a partly filled tail has no hash."""
    hashes: list[BlockHash] = []
    parent = root
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = next_block_hash(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return hashes


def hash_packed_blocks(root: BlockHash, token_ids: bytes, block_size: int) -> bytes:
    """Return the same hashes, joined, for token ids of four little-endian bytes each."""
    hashes: list[BlockHash] = []
    parent, size = root, 4 * block_size
    for end in range(size, len(token_ids) + 1, size):
        parent = _next(parent, token_ids[end - size : end])
        hashes.append(parent)
    return b"".join(hashes)


def fold(block_hash: BlockHash, space: bytes) -> BlockHash:
    """Return the key of a hash in a space of 16 bytes, and the hash of a key; without a space they are the same."""
    if not space:
        return block_hash
    return BlockHash((int.from_bytes(block_hash) ^ int.from_bytes(space)).to_bytes(NUM_HASH_BYTES))


@dataclass(slots=True)
class HashChain:
    """The last known hash of a request's chain, and how the keys of later blocks follow from it.

    The last known hash may lie behind the end of the last full block. The chain must continue from it, not from that
    block: within a public text a block has the hash of a chain without an account, and all accounts would share the
    answer that continued it. The gateway's last hash is never public.
    """

    end: BlockHash
    """The hash of the first `num_tokens` tokens; the root if there are none."""
    num_tokens: int
    grain: int
    """Tokens per hash."""
    space: bytes = b""
    """Empty: keys are hashes."""

    def next_key(self, token_ids: Sequence[int], end: int) -> BlockHash:
        """Advance the chain to the first `end` of a request's tokens; return the key of the block that ends there."""
        assert len(token_ids) >= end, f"{len(token_ids)} tokens, the block that ends at {end} is not full"
        for start in range(self.num_tokens, end, self.grain):
            self.end = next_block_hash(self.end, token_ids[start : start + self.grain])
        self.num_tokens = end
        return fold(self.end, self.space)


def _next(parent: BlockHash, token_ids: bytes) -> BlockHash:
    digest = blake2b(parent, digest_size=NUM_HASH_BYTES, person=b"tandem-block")
    digest.update(token_ids)
    return BlockHash(digest.digest())


def _little_endian_uint32(token_ids: Sequence[int]) -> bytes:
    numbers = array("I", token_ids)
    assert numbers.itemsize == 4, "array('I') is 4 bytes wide on every platform torch runs on"
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
