"""Holds blocks of vLLM's pool beside vLLM (vllm/v1/core/block_pool.py)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from tandem_engine.scheduling.block_hash import BlockHash

_GROUP = 0
"""With this connector vLLM keeps all layers in one group."""


class VllmBlocks:
    """Implements `tandem_vllm.blocks.Blocks`."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._size = block_size
        self.generations: Sequence[int] = _count_allocations(pool)

    @property
    def num_available(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def find(self, keys: Iterable[BlockHash]) -> list[int]:
        found: list[int] = []
        for key in keys:
            if (blocks := self._pool.get_cached_block(key, [_GROUP])) is None:
                break
            found.append(blocks[0].block_id)
        return found

    def take(self, num_blocks: int) -> list[int]:
        return [block.block_id for block in self._pool.get_new_blocks(num_blocks)]

    def hold(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def let_go(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks(self._pool.blocks[block] for block in reversed(blocks))

    def num_references(self, block: int) -> int:
        return int(self._pool.blocks[block].ref_cnt)

    def register(self, blocks: Sequence[int], keys: Sequence[BlockHash]) -> None:
        for index, block in enumerate(blocks):
            if self._pool.blocks[block].block_hash is None:
                named: Any = SimpleNamespace(block_hashes=list(keys[: index + 1]))
                table = [self._pool.blocks[each] for each in blocks[: index + 1]]
                self._pool.cache_full_blocks(named, table, index, index + 1, self._size, _GROUP)


class _Allocations:
    """Counts allocations, in the place of vLLM's metrics of blocks, which are off."""

    def __init__(self, num_blocks: int) -> None:
        self.generations = array("Q", bytes(8 * num_blocks))

    def on_block_allocated(self, block: Any) -> None:
        self.generations[block.block_id] += 1

    def on_block_accessed(self, block: Any) -> None: ...

    def on_block_evicted(self, block: Any) -> None: ...

    def reset(self) -> None: ...


def _count_allocations(pool: BlockPool) -> Sequence[int]:
    assert pool.metrics_collector is None, "vLLM's metrics of blocks are on"
    allocations: Any = _Allocations(len(pool.blocks))
    pool.metrics_collector = allocations
    generations: Sequence[int] = allocations.generations
    return generations
