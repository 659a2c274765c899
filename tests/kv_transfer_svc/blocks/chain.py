"""Readable block keys for tests: `block("a", 3)` is the fourth block of prompt a."""

from __future__ import annotations

from kv_transfer_svc.blocks.block import BlockKey
from kv_transfer_svc.blocks.leaf_heap import LeafHeap

LAYOUT = b"layout".ljust(16, b".")


def block(prompt: str, index: int) -> BlockKey:
    return BlockKey(LAYOUT, 0, f"{prompt}{index}".encode().ljust(16, b"."))


def chain(prompt: str, num_blocks: int) -> list[BlockKey]:
    return [block(prompt, index) for index in range(num_blocks)]


def name(key: BlockKey | None) -> str | None:
    return None if key is None else key.block_hash.rstrip(b".").decode()


def add(heap: LeafHeap, *prompts: tuple[str, int]) -> None:
    """Add each prompt's blocks in order."""
    for prompt, num_blocks in prompts:
        keys = chain(prompt, num_blocks)
        for key, parent in zip(keys, [None, *keys], strict=False):
            heap.add(key, parent)


def evict(heap: LeafHeap, num_blocks: int, busy: str = "") -> list[str | None]:
    """Remove that many victims and return their names; `busy` lists blocks that may not go, separated by spaces."""
    names: list[str | None] = []
    for _ in range(num_blocks):
        key = heap.victim(lambda key: name(key) in busy.split())
        names.append(name(key))
        if key is not None:
            heap.remove(key)
    return names
