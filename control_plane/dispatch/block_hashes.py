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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import overload

from control_plane.generation import AccountPolicies, TokenIds, TokenRequest, WirePrompt
from tandem.v1 import types_pb2 as pb
from tandem_engine.scheduling.block_hash import (
    NUM_HASH_BYTES,
    BlockHash,
    hash_blocks,
    hash_packed_blocks,
    hash_root,
)

_PUBLIC_SALT = b"public"
"""Shorter than every account's salt, so equal to none."""
_MAX_ACCOUNTS = 4096  # whose salts and tags are kept
_INLINE_TOKENS = 8192
"""Longer prompts that come without hashes are hashed in a thread; this many take about 1 ms."""


class BlockHashes(Sequence[bytes]):
    """A chain of block hashes in one piece of memory. Equal to any sequence of the same hashes."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        """`packed` has 16 bytes for each block."""
        self.packed = packed

    def __len__(self) -> int:
        return len(self.packed) // NUM_HASH_BYTES

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> BlockHashes: ...
    def __getitem__(self, place: int | slice) -> bytes | BlockHashes:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            assert step == 1, "a part of a chain has no gaps"
            return BlockHashes(self.packed[start * NUM_HASH_BYTES : stop * NUM_HASH_BYTES])
        start = range(len(self))[place] * NUM_HASH_BYTES
        return self.packed[start : start + NUM_HASH_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        packed = self.packed
        return (packed[start : start + NUM_HASH_BYTES] for start in range(0, len(packed), NUM_HASH_BYTES))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockHashes):
            return self.packed == other.packed
        return isinstance(other, Sequence) and len(other) == len(self) and self.packed == b"".join(other)

    def __hash__(self) -> int:
        return hash(self.packed)


@dataclass(frozen=True)
class PromptHashes:
    """The chain of block hashes of a prompt; computed once, used by router and workers."""

    root: bytes
    blocks: BlockHashes
    account_tag: bytes = b""
    num_public_blocks: int = 0
    """Leading blocks that all accounts share."""
    max_found_blocks: int | None = None
    """Leading blocks that may come from caches; None: all."""
    max_left_blocks: int | None = None
    """Leading blocks that later requests may find; None: all, and the answer's blocks."""
    wire: bytes = b""
    """A serialized Submit that has the block hashes only; b"": there are none."""

    def __post_init__(self) -> None:
        ends_private = self.num_public_blocks < max(1, len(self.blocks))
        assert ends_private, "all accounts would share the answer's blocks: their chain continues from the last hash"

    def followed_by(self, block_hashes: Iterable[bytes]) -> BlockHashes:
        """Return the prompt's hashes and those of an answer after it."""
        return BlockHashes(b"".join((self.blocks.packed, *block_hashes)))

    def with_answer(self, token_ids: Sequence[int], answer: Sequence[int], block_size: int) -> BlockHashes:
        """Return the hashes of all full blocks of the prompt's `token_ids` and an answer after them."""
        return self.followed_by(self.after_prompt(token_ids, answer, block_size))

    def after_prompt(self, token_ids: Sequence[int], answer: Sequence[int], block_size: int) -> list[BlockHash]:
        """Return the hashes of the blocks that an answer fills after the prompt's full blocks."""
        parent = self.blocks[-1] if self.blocks else self.root
        rest = [*token_ids[len(self.blocks) * block_size :], *answer]
        return hash_blocks(BlockHash(parent), rest, block_size)


def hash_prompt(
    card: pb.ModelCard, token_ids: Sequence[int], salt: bytes, account_tag: bytes = b"", num_public_tokens: int = 0
) -> PromptHashes:
    """Hash a prompt whose first `num_public_tokens` tokens are a public text."""
    packed = token_ids.packed() if isinstance(token_ids, TokenIds) else TokenIds(token_ids).packed()
    root, hashes, num_public = hash_packed(card.fingerprint.digest, card.block_size, packed, salt, num_public_tokens)
    blocks = BlockHashes(hashes)
    return PromptHashes(root, blocks, account_tag, num_public, wire=_wire_hashes(blocks))


def hash_packed(
    fingerprint: bytes, block_size: int, token_ids: bytes, salt: bytes, num_public_tokens: int
) -> tuple[bytes, bytes, int]:
    """Return the root, the joined hashes and the number of public blocks of a prompt of packed token ids."""
    root = hash_root(fingerprint, block_size, "", salt)
    hashes = hash_packed_blocks(root, token_ids, block_size)
    num_public = max(0, min(num_public_tokens // block_size, len(hashes) // NUM_HASH_BYTES - 1))
    public_root = hash_root(fingerprint, block_size, "", _PUBLIC_SALT)
    public = hash_packed_blocks(public_root, token_ids[: num_public * block_size * 4], block_size)
    return root, public + hashes[len(public) :], num_public


def wire_prompt(
    token_ids: TokenIds, *, fingerprint: bytes, block_size: int, salt: bytes | None, num_public_tokens: int
) -> WirePrompt:
    """Return a prompt in the form in which workers receive it; without hashes if `salt` is None.

    `salt`: the account's, with the request's own after it. This takes time for long prompts; text processes call it.
    """
    ids = wire_ids(token_ids)
    if salt is None or not block_size:
        return WirePrompt(ids, b"")
    root, hashes, num_public = hash_packed(fingerprint, block_size, token_ids.packed(), salt, num_public_tokens)
    return WirePrompt(ids, root, hashes, num_public, _wire_hashes(BlockHashes(hashes)))


def wire_ids(token_ids: Sequence[int]) -> bytes:
    """Return a serialized Submit that has these token ids only."""
    return pb.Submit(token_ids=token_ids).SerializeToString()


def _wire_hashes(blocks: BlockHashes) -> bytes:
    return pb.Submit(block_hashes=blocks).SerializeToString()


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
        hashes = self._known(request, card)
        if hashes is None and num_tokens <= _INLINE_TOKENS:
            hashes = self._hash(request, card)
        elif hashes is None:
            hashes = await asyncio.to_thread(self._hash, request, card)
        return replace(hashes, max_found_blocks=max_found, max_left_blocks=max_left)

    def _known(self, request: TokenRequest, card: pb.ModelCard) -> PromptHashes | None:
        """Return the hashes that came with the request; None if they are of another model or salt, or there are none.

        The model's workers may have changed since the prompt was prepared.
        """
        wire, size = request.wire, card.block_size
        if (
            wire is None
            or not wire.hash_root
            or wire.hash_root != hash_root(card.fingerprint.digest, size, "", self._salt(request))
        ):
            return None
        blocks = BlockHashes(wire.hashes)
        if len(blocks) != len(request.token_ids) // size:
            return None
        tag = account_tag(self._secret, request.account)
        return PromptHashes(wire.hash_root, blocks, tag, wire.num_public_blocks, wire=wire.block_hashes)

    def _hash(self, request: TokenRequest, card: pb.ModelCard) -> PromptHashes:
        """Hash a prompt; a request with its own salt shares no blocks, public ones included."""
        num_public_tokens = 0 if request.salt else request.num_public_tokens
        tag = account_tag(self._secret, request.account)
        return hash_prompt(card, request.token_ids, self._salt(request), tag, num_public_tokens)

    def _salt(self, request: TokenRequest) -> bytes:
        return cache_salt(self._secret, request.account) + request.salt


@lru_cache(maxsize=_MAX_ACCOUNTS)
def cache_salt(secret: bytes, account: str) -> bytes:
    """Return the salt that separates an account's cached blocks from those of every other account."""
    return hmac.digest(secret, b"tandem cache salt\0" + account.encode(), hashlib.sha256)[:16]


@lru_cache(maxsize=_MAX_ACCOUNTS)
def account_tag(secret: bytes, account: str) -> bytes:
    """Return the tag that an account's cached blocks are counted under; KV services never see its name."""
    return hmac.digest(secret, b"tandem account tag\0" + account.encode(), hashlib.sha256)[:8]
