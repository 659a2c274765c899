"""Indexes stored blocks by key and by slot, and counts the bytes in each state.

The table and the allocator change together: a block in the table has an extent, a removed block has none.
"""

from __future__ import annotations

from collections.abc import Iterator

from kv_transfer_svc.blocks.allocator import BlockAllocator, Extent
from kv_transfer_svc.blocks.block import Block, BlockKey, BlockState
from tandem_runtime.kv.known_blocks import BlockCounters


class BlockTable:
    """Blocks by key and by slot, and the bytes held in each state."""

    def __init__(self, allocator: BlockAllocator, counters: BlockCounters | None = None) -> None:
        self._allocator = allocator
        self._counters = counters
        self._blocks: dict[BlockKey, Block] = {}
        self._at: dict[int, Block] = {}
        self._unsettled: dict[BlockKey, Block] = {}
        self._bytes = dict.fromkeys(BlockState, 0)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def __getitem__(self, key: BlockKey) -> Block:
        return self._blocks[key]

    def get(self, key: BlockKey) -> Block | None:
        return self._blocks.get(key)

    def find(self, key: BlockKey) -> Block | None:
        """Return a block that may be read, or None."""
        block = self._blocks.get(key)
        return block if block is not None and block.is_readable else None

    def in_state(self, key: BlockKey, extent: Extent, *states: BlockState) -> Block | None:
        """Return the block if its extent is `extent` and its state is one of `states`."""
        block = self._blocks.get(key)
        return block if block is not None and block.extent == extent and block.state in states else None

    def at(self, slot: int) -> Block:
        return self._at[slot]

    def held_bytes(self, state: BlockState) -> int:
        return self._bytes[state]

    @property
    def unsettled(self) -> list[Block]:
        """Blocks that are being copied, to memory or to disk."""
        return list(self._unsettled.values())

    def enter(self, block: Block) -> None:
        self._blocks[block.key] = block
        self._at[block.extent.slot] = block
        self._bytes[block.state] += block.extent.held_bytes
        self._unsettled[block.key] = block
        if self._counters is not None:
            self._counters.add(block.key.layout_digest, block.key.block_hash)

    def change(self, block: Block, state: BlockState) -> None:
        self._bytes[block.state] -= block.extent.held_bytes
        self._bytes[state] += block.extent.held_bytes
        block.state = state
        if block.is_readable:
            self._unsettled.pop(block.key, None)
        else:
            self._unsettled[block.key] = block

    def remove(self, block: Block) -> None:
        """Forget a block and free its memory."""
        del self._blocks[block.key], self._at[block.extent.slot]
        self._unsettled.pop(block.key, None)
        self._bytes[block.state] -= block.extent.held_bytes
        self._allocator.free(block.extent)
        if self._counters is not None:
            self._counters.remove(block.key.layout_digest, block.key.block_hash)

    def check(self) -> None:
        """Assert that every byte is free or held once, and that every block's memory is still its own."""
        self._allocator.check()
        for state in BlockState:
            held = sum(block.extent.held_bytes for block in self if block.state is state)
            assert held == self._bytes[state], f"{self._bytes[state]} bytes are counted as {state.name}, {held} are"
        total = self._allocator.free_bytes + sum(self._bytes.values())
        assert total == self._allocator.total_bytes, f"{total} bytes are free or held, of {self._allocator.total_bytes}"
        assert len(self._at) == len(self._blocks), "two blocks lie in one slot"
        for block in self:
            assert self._at[block.extent.slot] is block, f"{block.key} is not found at its slot"
            assert self._allocator.is_current(block.extent), f"{block.key} lies in a slot that was freed"
            assert block.is_readable != (block.key in self._unsettled), f"{block.key} is settled and unsettled"
