"""Hashes a prompt's blocks, and bounds which of them may be found in caches or left there.

    tokens   | public text, whole blocks | the account's own ...                      | a tail: no hash
    hashes     p0  p1  ...                 ak  ak+1  ...

The chain a0 a1 ... is rooted in the account's salt and covers all blocks. Blocks within a public text take their hash
from a chain p0 p1 ... without an account instead. Each ak still depends on the account. Workers continue the chain from
the last hash, so the last hash is never public.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace

from control_plane.generation import AccountPolicies, TokenRequest
from tandem.v1 import types_pb2 as pb
from tandem_engine.scheduling.block_hash import BlockHash, hash_blocks, hash_root

_PUBLIC_SALT = b"public"
"""Shorter than every account's salt, so equal to none."""


@dataclass(frozen=True)
class PromptHashes:
    """The chain of block hashes of a prompt; computed here once, used by router and workers."""

    root: bytes
    blocks: tuple[bytes, ...]
    account_tag: bytes = b""
    num_public_blocks: int = 0
    """Leading blocks that all accounts share."""
    max_found_blocks: int | None = None
    """Leading blocks that may come from caches; None: all."""
    max_left_blocks: int | None = None
    """Leading blocks that later requests may find; None: all, and the answer's blocks."""

    def __post_init__(self) -> None:
        ends_private = self.num_public_blocks < max(1, len(self.blocks))
        assert ends_private, "all accounts would share the answer's blocks: their chain continues from the last hash"

    def with_answer(self, token_ids: Sequence[int], block_size: int) -> tuple[bytes, ...]:
        """Return the hashes of all full blocks of `token_ids`: the prompt and the tokens after it."""
        parent = self.blocks[-1] if self.blocks else self.root
        rest = token_ids[len(self.blocks) * block_size :]
        return (*self.blocks, *hash_blocks(BlockHash(parent), rest, block_size))


def hash_prompt(
    card: pb.ModelCard, token_ids: Sequence[int], salt: bytes, account_tag: bytes = b"", num_public_tokens: int = 0
) -> PromptHashes:
    """Hash a prompt whose first `num_public_tokens` tokens are a public text."""
    size = card.block_size
    root = hash_root(card.fingerprint.digest, size, "", salt)
    blocks = hash_blocks(root, token_ids, size)
    num_public = max(0, min(num_public_tokens // size, len(blocks) - 1))
    public_root = hash_root(card.fingerprint.digest, size, "", _PUBLIC_SALT)
    blocks[:num_public] = hash_blocks(public_root, token_ids[: num_public * size], size)
    return PromptHashes(root, tuple(blocks), account_tag, num_public)


class PromptHasher:
    """Hashes prompts so that two accounts share public blocks only, within the bounds of request and account."""

    def __init__(self, secret: bytes, accounts: AccountPolicies) -> None:
        self._secret = secret
        self._accounts = accounts

    async def hashes(self, request: TokenRequest, card: pb.ModelCard) -> PromptHashes | None:
        """Return a prompt's hashes; None if no cache may hold the prompt."""
        policy = self._accounts.of(request.account).within(request.cache)
        num_tokens = len(request.token_ids)
        max_found = policy.max_found_blocks(num_tokens, card.block_size)
        max_left = policy.max_left_blocks(num_tokens, card.block_size)
        if max_found == max_left == 0:
            return None
        hashes = await asyncio.to_thread(self._hash, request, card)
        return replace(hashes, max_found_blocks=max_found, max_left_blocks=max_left)

    def _hash(self, request: TokenRequest, card: pb.ModelCard) -> PromptHashes:
        """Hash a prompt; a request with its own salt shares no blocks, public ones included."""
        salt = cache_salt(self._secret, request.account) + request.salt
        num_public_tokens = 0 if request.salt else request.num_public_tokens
        tag = account_tag(self._secret, request.account)
        return hash_prompt(card, request.token_ids, salt, tag, num_public_tokens)


def cache_salt(secret: bytes, account: str) -> bytes:
    """Return the salt that separates an account's cached blocks from those of every other account."""
    return hmac.digest(secret, b"tandem cache salt\0" + account.encode(), hashlib.sha256)[:16]


def account_tag(secret: bytes, account: str) -> bytes:
    """Return the tag that an account's cached blocks are counted under; KV services never see its name."""
    return hmac.digest(secret, b"tandem account tag\0" + account.encode(), hashlib.sha256)[:8]
