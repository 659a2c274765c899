"""Names the blocks of vLLM's prefix cache by Tandem's keys (law 1).

vLLM asks for one key per full block. It finds and leaves blocks by the same list, so a block has the shared key only
where the request may do both; a block behind that limit has a key that no other request has.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from tandem_engine.scheduling.block_hash import NUM_HASH_BYTES, BlockHash
from tandem_engine.scheduling.request import Request


def shared_key(request: Request, index: int, block_size: int, token_ids: Sequence[int] | None = None) -> BlockHash:
    """Return the key of a full block of a request with a hash root; extends the chain for blocks of the answer.

    `token_ids`: the request's tokens, where someone knows more of them than the request itself.
    """
    assert request.chain is not None, f"{request.request_id} has no hash root"
    keys, tokens = request.block_hashes, request.token_ids if token_ids is None else token_ids
    while len(keys) <= index:
        keys.append(request.chain.next_key(tokens, (len(keys) + 1) * block_size))
    return keys[index]


def pool_key(request: Request, index: int, block_size: int, token_ids: Sequence[int] | None = None) -> BlockHash:
    """Return the key of a full block in vLLM's prefix cache."""
    if index < num_shared_blocks(request):
        return shared_key(request, index, block_size, token_ids)
    name = f"{request.request_id}/{request.arrival}/{request.added_ns}/{index}"
    return BlockHash(blake2b(name.encode(), digest_size=NUM_HASH_BYTES, person=b"tandem-private").digest())


def num_shared_blocks(request: Request) -> float:
    """Return how many leading blocks the request may find and leave in this pool; it may be infinite."""
    if request.hash_root is None:
        return 0
    limits = (request.max_found_blocks, request.max_left_blocks)
    return min((limit for limit in limits if limit is not None), default=float("inf"))
