"""Turns the hashes of a gateway's Submit into this worker's own keys, before anything else of the worker reads them.

    Submit of a gateway         one hash per grain of the fleet, counts in grains
    after `take_hashes`         one key per full block of this worker, counts in blocks

Behind this module nobody sees a hash: pool, store, disk, block events and drafts hold keys only, so none of them can
find a block of another space. A Submit without a space (gateways of release 0.2) has keys already.
"""

from __future__ import annotations

from tandem.v1 import types_pb2 as pb
from tandem_engine.messages import ChainEnd
from tandem_runtime.errors import FingerprintMismatch, InvalidRequest
from tandem_runtime.kv.spaces import NUM_BYTES, fold, worker_keys


def take_hashes(submit: pb.Submit, space: bytes, block_size: int) -> ChainEnd | None:
    """Replace root, hashes and counts of `submit` by those of a worker with this space and block size, once.

    Returns where the chain goes on for blocks of the answer; None if nothing was replaced. Raises FingerprintMismatch
    for another space, or a grain that does not divide the worker's blocks: the gateway asks the next worker. Raises
    InvalidRequest for hashes of another length.
    """
    if not submit.space:
        return None
    if submit.space != space:
        raise FingerprintMismatch(
            f"the request was hashed for the space {submit.space.hex()}, this worker's is {space.hex()}: its numerics "
            "class or KV layout is another one; ask the next worker",
            field="space",
        )
    grain = submit.hash_grain or block_size
    per_block, rest = divmod(block_size, grain)
    if rest or not per_block:
        raise FingerprintMismatch(
            f"the request has a hash for each {grain} tokens, this worker's blocks have {block_size}, no multiple of "
            f"it; ask the next worker, or start this one with --block-size as a multiple of the gateway's --hash-grain",
            field="hash_grain",
        )
    if any(len(each) != NUM_BYTES for each in (submit.hash_root or bytes(NUM_BYTES), *submit.block_hashes)):
        raise InvalidRequest(f"a hash of the request does not have {NUM_BYTES} bytes", field="block_hashes")
    hashes = b"".join(submit.block_hashes)
    end = hashes[-NUM_BYTES:] or submit.hash_root
    num_tokens = len(submit.block_hashes) * grain
    _replace(submit, worker_keys(hashes, grain, block_size, space), per_block)
    submit.hash_root = fold(submit.hash_root, space)
    return ChainEnd(end.hex(), num_tokens, grain, space.hex()) if end else None


def _replace(submit: pb.Submit, keys: bytes, per_block: int) -> None:
    """Counts are rounded down: a block that is public, found or left in part only is not."""
    submit.block_hashes[:] = [keys[start : start + NUM_BYTES] for start in range(0, len(keys), NUM_BYTES)]
    submit.hash_grain = 0
    submit.num_public_blocks //= per_block
    for name in ("max_found_blocks", "max_left_blocks"):
        if submit.HasField(name):
            setattr(submit, name, getattr(submit, name) // per_block)
