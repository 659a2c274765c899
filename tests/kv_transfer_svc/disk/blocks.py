"""Numbered test blocks for the disk tier, whose content identifies them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from kv_transfer_svc.blocks.block import BlockKey
from kv_transfer_svc.disk import DiskTier
from tandem_runtime.kv.checksum import block_checksum

LAYOUT = b"layout of a test"


def a_key(number: int) -> BlockKey:
    return BlockKey(LAYOUT, 0, number.to_bytes(16, "little"))


def a_payload(number: int, num_bytes: int = 384) -> bytes:
    """Return bytes that only block `number` has; 384 of them make a record of 512."""
    digest = hashlib.sha256(number.to_bytes(16, "little")).digest()
    return (digest * (num_bytes // len(digest) + 1))[:num_bytes]


async def put_all(tier: DiskTier, numbers: Sequence[int], num_bytes: int = 384) -> list[bool]:
    """Write blocks one after another; return for each whether it is kept."""
    kept = []
    for number in numbers:
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        assert tier.put(a_key(number), a_payload(number, num_bytes), done=done.set_result)
        kept.append(await done)
    return kept


async def served(tier: DiskTier, numbers: Sequence[int], num_bytes: int = 384) -> list[int]:
    """Return the blocks that are served; each must be as written."""
    blocks = await tier.get([a_key(number) for number in numbers])
    found = [(number, block) for number, block in zip(numbers, blocks, strict=True) if block is not None]
    assert all(block.payload == a_payload(number, num_bytes) for number, block in found)
    assert all(block.checksum == block_checksum(block.payload) for _, block in found)
    return [number for number, _ in found]
