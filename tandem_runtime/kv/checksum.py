"""Computes the checksums of KV blocks: xxh3-64 of each block.

The writer may put checksums into its slabs; else the sender of `Read` computes them while it copies. They arrive
after the last chunk, in the trailing metadata `tandem-checksums-bin`: a little-endian uint64 per block, in order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

CHECKSUMS_METADATA = "tandem-checksums-bin"


def block_checksum(block: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(block)


def pack_checksums(checksums: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(checksums)}Q", *checksums)


def unpack_checksums(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))
