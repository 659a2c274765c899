"""Hashes a prompt's blocks, and bounds which of them may be found in caches or left there.

A block here has as many tokens as the fleet's grain (--hash-grain); a worker's own block is a multiple of that. Hashes
depend on the model's identity, and neither on a worker's numerics class nor on its KV layout: a prompt is hashed once,
before its workers are known. Each worker makes the keys of its blocks from the hashes (tandem_runtime/kv/spaces.py).

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from control_plane.block_chain import BlockHashes
from control_plane.generation import DEFAULT_GRAIN, AccountPolicies, TokenIds, TokenRequest, WirePrompt
from tandem.v1 import types_pb2 as pb
from tandem_engine.scheduling.block_hash import (
    NUM_HASH_BYTES,
    BlockHash,
    hash_blocks,
    hash_packed_blocks,
    hash_root,
)
from tandem_runtime.kv.spaces import model_identity

_PUBLIC_SALT = b"public"
"""Shorter than every account's salt, so equal to none."""
_MAX_ACCOUNTS = 4096  # whose salts and tags are kept
INLINE_TOKENS = 8192
"""Longer prompts that come without hashes are hashed in a thread; this many take about 1 ms."""


@dataclass(frozen=True)
class PromptHashes:
    """The chain of block hashes of a prompt; computed once, used by router and workers. A block has `grain` tokens."""

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
    grain: int = DEFAULT_GRAIN
    salt: bytes = field(default=b"", repr=False)
    """Of the root."""
    num_public_tokens: int = 0
    """Leading tokens of a public text; `num_public_blocks` may be fewer."""

    def __post_init__(self) -> None:
        ends_private = self.num_public_blocks < max(1, len(self.blocks))
        assert ends_private, "all accounts would share the answer's blocks: their chain continues from the last hash"

    def followed_by(self, block_hashes: Iterable[bytes]) -> BlockHashes:
        """Return the prompt's hashes and those of an answer after it."""
        return BlockHashes(b"".join((self.blocks.packed, *block_hashes)))

    def with_answer(self, token_ids: Sequence[int], answer: Sequence[int]) -> BlockHashes:
        """Return the hashes of all full blocks of the prompt's `token_ids` and an answer after them."""
        return self.followed_by(self.after_prompt(token_ids, answer))

    def after_prompt(self, token_ids: Sequence[int], answer: Sequence[int]) -> list[BlockHash]:
        """Return the hashes of the blocks that an answer fills after the prompt's full blocks."""
        parent = self.blocks[-1] if self.blocks else self.root
        rest = [*token_ids[len(self.blocks) * self.grain :], *answer]
        return hash_blocks(BlockHash(parent), rest, self.grain)


def hash_prompt(
    identity: bytes,
    token_ids: Sequence[int],
    salt: bytes,
    account_tag: bytes = b"",
    num_public_tokens: int = 0,
    grain: int = DEFAULT_GRAIN,
    adapter: str = "",
) -> PromptHashes:
    """Hash a prompt whose first `num_public_tokens` tokens are a public text.

    `adapter`: the digest of the LoRA adapter, if any. `identity`: the model's. For a worker of release 0.2, `identity`
    is its fingerprint and `grain` its block size.
    """
    root, hashes, num_public = hash_packed(identity, grain, packed(token_ids), salt, num_public_tokens, adapter)
    blocks = BlockHashes(hashes)
    wire = wire_hashes(blocks)
    return PromptHashes(
        root, blocks, account_tag, num_public, wire=wire, grain=grain, salt=salt, num_public_tokens=num_public_tokens
    )


def hash_packed(
    identity: bytes, grain: int, token_ids: bytes, salt: bytes, num_public_tokens: int, adapter: str = ""
) -> tuple[bytes, bytes, int]:
    """Return the root, the joined hashes and the number of public blocks of a prompt of packed token ids."""
    root = hash_root(identity, grain, adapter, salt)
    hashes = hash_packed_blocks(root, token_ids, grain)
    num_public = max(0, min(num_public_tokens // grain, len(hashes) // NUM_HASH_BYTES - 1))
    public_root = hash_root(identity, grain, adapter, _PUBLIC_SALT)
    public = hash_packed_blocks(public_root, token_ids[: num_public * grain * 4], grain)
    return root, public + hashes[len(public) :], num_public


def wire_prompt(
    token_ids: TokenIds, *, identity: bytes, grain: int, salt: bytes | None, num_public_tokens: int, adapter: str = ""
) -> WirePrompt:
    """Return a prompt in the form in which workers receive it; without hashes if `salt` is None.

    `salt`: the account's, with the request's own after it. This takes time for long prompts; text processes call it.
    """
    ids = wire_ids(token_ids)
    if salt is None:
        return WirePrompt(ids, b"")
    root, hashes, num_public = hash_packed(identity, grain, token_ids.packed(), salt, num_public_tokens, adapter)
    return WirePrompt(ids, root, hashes, num_public, wire_hashes(BlockHashes(hashes)))


def packed(token_ids: Sequence[int]) -> bytes:
    """Return token ids in four little-endian bytes each."""
    return token_ids.packed() if isinstance(token_ids, TokenIds) else TokenIds(token_ids).packed()


def wire_ids(token_ids: Sequence[int]) -> bytes:
    """Return a serialized Submit that has these token ids only."""
    return pb.Submit(token_ids=token_ids).SerializeToString()


def wire_hashes(blocks: BlockHashes) -> bytes:
    """Return a serialized Submit that has these block hashes only."""
    return pb.Submit(block_hashes=blocks).SerializeToString()


class PromptHasher:
    """Hashes prompts so that two accounts share public blocks only, within the bounds of request and account."""

    def __init__(self, secret: bytes, accounts: AccountPolicies, grain: int = DEFAULT_GRAIN) -> None:
        self._secret = secret
        self._accounts = accounts
        self._grain = grain

    async def hashes(self, request: TokenRequest, card: pb.ModelCard) -> PromptHashes | None:
        """Return a prompt's hashes; None if no cache may hold the prompt."""
        policy = self._accounts.of(request.account).within(request.cache)
        num_tokens = len(request.token_ids)
        max_found = policy.max_found_blocks(num_tokens, self._grain)
        max_left = policy.max_left_blocks(num_tokens, self._grain)
        if max_found == max_left == 0:
            return None
        hashes = self._known(request, card)
        if hashes is None and num_tokens <= INLINE_TOKENS:
            hashes = self._hash(request, card)
        elif hashes is None:
            hashes = await asyncio.to_thread(self._hash, request, card)
        return replace(hashes, max_found_blocks=max_found, max_left_blocks=max_left)

    def _known(self, request: TokenRequest, card: pb.ModelCard) -> PromptHashes | None:
        """Return the hashes that came with the request; None if they are of another model or salt, or there are none.

        The model's workers may have changed since the prompt was prepared.
        """
        wire, salt = request.wire, self._salt(request)
        if (
            wire is None
            or not wire.hash_root
            or wire.hash_root != hash_root(model_identity(card.fingerprint), self._grain, _adapter(request), salt)
        ):
            return None
        blocks = BlockHashes(wire.hashes)
        if len(blocks) != len(request.token_ids) // self._grain:
            return None
        return PromptHashes(
            wire.hash_root,
            blocks,
            account_tag(self._secret, request.account),
            wire.num_public_blocks,
            wire=wire.block_hashes,
            grain=self._grain,
            salt=salt,
            num_public_tokens=_num_public_tokens(request),
        )

    def _hash(self, request: TokenRequest, card: pb.ModelCard) -> PromptHashes:
        """Hash a prompt of this request."""
        tag, identity = account_tag(self._secret, request.account), model_identity(card.fingerprint)
        salt, num_public_tokens = self._salt(request), _num_public_tokens(request)
        return hash_prompt(identity, request.token_ids, salt, tag, num_public_tokens, self._grain, _adapter(request))

    def _salt(self, request: TokenRequest) -> bytes:
        return cache_salt(self._secret, request.account) + request.salt


def _adapter(request: TokenRequest) -> str:
    """Return what stands for the request's adapter in the roots of its hashes."""
    return request.adapter.digest if request.adapter is not None else ""


def _num_public_tokens(request: TokenRequest) -> int:
    """Count the public tokens; a request with its own salt shares no blocks, public ones included."""
    return 0 if request.salt else request.num_public_tokens


@lru_cache(maxsize=_MAX_ACCOUNTS)
def cache_salt(secret: bytes, account: str) -> bytes:
    """Return the salt that separates an account's cached blocks from those of every other account."""
    return hmac.digest(secret, b"tandem cache salt\0" + account.encode(), hashlib.sha256)[:16]


@lru_cache(maxsize=_MAX_ACCOUNTS)
def account_tag(secret: bytes, account: str) -> bytes:
    """Return the tag that an account's cached blocks are counted under; KV services never see its name."""
    return hmac.digest(secret, b"tandem account tag\0" + account.encode(), hashlib.sha256)[:8]
