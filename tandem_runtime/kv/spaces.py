"""Names what two workers of one model must have equal, and turns hashes of a prompt into the keys of a worker's blocks.

    model identity   weights, quantization, tokenizer: equal for one model name; hash roots are made of it
    layout family    what two KV layouts have equal that can be converted into each other
    space            which blocks a worker may read and write: those of its numerics class and layout, or, if its model
                     promises less, those of its layout family
    grain            tokens per hash of a prompt's chain; a worker's block is a multiple of it
    key              what a block is found by, everywhere: hash XOR space, 16 bytes

For one space XOR is a bijection. Keys of two spaces are equal only where two hashes differ by exactly the difference of
the spaces; to find such a pair is as hard as a collision of 128-bit BLAKE2b.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.layout import layout_digest

NUM_BYTES = 16
"""Of an identity, a family, a space, a hash and a key."""


def model_identity(fingerprint: pb.Fingerprint) -> bytes:
    """Return 16 bytes that are equal for equal weights, quantization and tokenizer."""
    return _digest(
        b"tandem-identity", fingerprint.weights_digest, fingerprint.quantization, fingerprint.tokenizer_digest
    )


def layout_family(layout: pb.KvLayout) -> bytes:
    """Return 16 bytes, equal for layouts that can be converted: dtype, order and tokens per block may differ."""
    return layout_digest(common_part(layout))


def common_part(layout: pb.KvLayout) -> pb.KvLayout:
    """Return the fields of a layout that all layouts of its family have in common.

    An order without dimensions is the name of one that its own engine alone can read: nobody converts such blocks.
    """
    family = pb.KvLayout()
    family.CopyFrom(layout)
    for group in family.groups:
        if group.order and "," not in group.order:
            continue
        for name in ("dtype", "order", "tokens_per_block", "bytes_per_block"):
            group.ClearField(name)
    return family


def space_of(card: pb.ModelCard) -> bytes:
    """Return the 16 bytes that name the blocks which a worker with this card may read and write."""
    if card.exactness == "layout":
        return _space("layout", layout_family(card.layout).hex())
    return _space("class", card.fingerprint.numerics_class, layout_digest(card.layout).hex())


def fold(hashes: bytes, space: bytes) -> bytes:
    """Return the keys of joined 16-byte hashes in a space; the same call turns keys back into hashes."""
    if not hashes or not space:
        return hashes
    mask = int.from_bytes(space * (len(hashes) // NUM_BYTES), "little")  # one operation on one large number
    return (int.from_bytes(hashes, "little") ^ mask).to_bytes(len(hashes), "little")


def worker_keys(hashes: bytes, grain: int, block_size: int, space: bytes) -> bytes:
    """Return the joined keys of a worker's full blocks, of the joined hashes of a chain with `grain` tokens each.

    A block has the hash of its last tokens. Raises ValueError unless `block_size` is a multiple of `grain`.
    """
    num_hashes, rest = divmod(block_size, grain)
    if rest:
        raise ValueError(f"a block of {block_size} tokens is no multiple of the grain, {grain} tokens")
    if num_hashes > 1:
        step = num_hashes * NUM_BYTES
        hashes = b"".join(hashes[end - NUM_BYTES : end] for end in range(step, len(hashes) + 1, step))
    return fold(hashes, space)


@lru_cache(maxsize=1024)
def _space(*parts: str) -> bytes:
    return _digest(b"tandem-space", *parts)


def _digest(person: bytes, *parts: str) -> bytes:
    digest = hashlib.blake2b(digest_size=NUM_BYTES, person=person)
    for part in parts:
        content = part.encode()
        digest.update(len(content).to_bytes(4, "little") + content)
    return digest.digest()
