"""Where do the keys and values of computed tokens lie?

The pool is block-major: one block, all its layers, is one run of bytes, so that moving a block is one copy.

    pool    [num_blocks, num_layers, 2 (key, value), num_kv_heads, block_size, head_dim]
    region  | pool | padding to a page | generations: uint64 [num_blocks] |       one memfd, shared with readers

On a CPU the region is the pool. On CUDA the pool is the device's and the region a copy of it that `stage` keeps up.
"""

from __future__ import annotations

import math
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from engine.execution.crew import share
from engine.execution.regions import OwnedRegion
from engine.messages import LayoutInfo

BLOCK_ORDER = "layer,kv,head,token,dim"
_PAGE_BYTES = 4096
_GENERATION_BYTES = 8


@dataclass(frozen=True)
class KVGeometry:
    """What one block holds."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        return math.prod(self.block_shape) * self.dtype.itemsize

    def layout(self) -> LayoutInfo:
        """Return the geometry as it is told to other processes."""
        return LayoutInfo(
            num_layers=self.num_layers,
            tokens_per_block=self.block_size,
            num_kv_heads=self.num_kv_heads,
            k_head_size=self.head_dim,
            v_head_size=self.head_dim,
            dtype=dtype_name(self.dtype),
            order=BLOCK_ORDER,
            bytes_per_block=self.bytes_per_block,
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


class PagedKVCache:
    """The one owner of KV tensors in an engine process.

    With `staging` (what a device other than the CPU needs) the pool is a tensor of its own and readers see copies.
    """

    def __init__(
        self, geometry: KVGeometry, num_blocks: int, device: torch.device, *, staging: bool | None = None
    ) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        pool_bytes = num_blocks * geometry.bytes_per_block
        self.generations_offset = -(-pool_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self.region = OwnedRegion(self.generations_offset + num_blocks * _GENERATION_BYTES)
        self.generations: MutableSequence[int] = self.region.uint64_table(self.generations_offset, num_blocks)
        shared = torch.from_numpy(self.region.bytes_at(0, pool_bytes)).view(num_blocks, geometry.bytes_per_block)
        is_staged = device.type != "cpu" if staging is None else staging
        self._staged = shared if is_staged else None
        self._rows = torch.zeros_like(shared, device=device) if is_staged else shared  # [num_blocks, bytes], uint8
        self._bytes = self._rows.numpy() if self._rows.device.type == "cpu" else None
        pool = self._rows.view(-1).view(geometry.dtype).view(num_blocks, *geometry.block_shape)
        self._keys = [pool[:, layer, 0] for layer in range(geometry.num_layers)]  # [num_blocks, heads, tokens, dim]
        self._values = [pool[:, layer, 1] for layer in range(geometry.num_layers)]
        self._head_rows = pool.view(-1, geometry.block_size * geometry.head_dim)  # (block, layer, kv, head) by row
        self._key_and_value_heads = torch.arange(2 * geometry.num_kv_heads, device=device).unsqueeze(1)

    @property
    def device(self) -> torch.device:
        return self._rows.device

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Store `key` and `value`, [num_tokens, num_kv_heads, head_dim], at `slots` [num_tokens], int64."""
        blocks, offsets = slots // self.geometry.block_size, slots % self.geometry.block_size
        self._keys[layer][blocks, :, offsets] = key
        self._values[layer][blocks, :, offsets] = value

    def gather(self, layer: int, blocks: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, [num_kv_heads, end - start, head_dim], of a request whose block table is `blocks`."""
        block_size = self.geometry.block_size
        first, last = start // block_size, -(-end // block_size)
        needed = blocks[first:last]
        window = slice(start - first * block_size, end - first * block_size)
        rows = (needed * self.geometry.num_layers + layer) * len(self._key_and_value_heads) + self._key_and_value_heads
        # An embedding look-up copies rows twice as fast as indexing the pool's dimensions does.
        content = functional.embedding(rows, self._head_rows)  # [2 * heads, blocks, tokens * dim]
        keys, values = content.view(2, self.geometry.num_kv_heads, -1, self.geometry.head_dim)
        return keys[:, window], values[:, window]

    def write_blocks(self, first: int, content: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Overwrite whole blocks, `first` and those behind it, with as many bytes; `content` may be read-only."""
        size = self.geometry.bytes_per_block
        num_blocks = len(content) // size
        rows = self._rows[first : first + num_blocks].view(-1)
        if self.device.type == "cpu":
            here = rows.numpy()
            share(
                lambda start, end: np.copyto(here[start * size : end * size], content[start * size : end * size]),
                num_blocks,
                size,
            )
        else:
            rows.copy_(torch.from_numpy(content.copy()))

    def bytes_of(self, block: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return a block's bytes: on a CPU those of the pool itself, else a copy."""
        content: np.ndarray[tuple[int], np.dtype[np.uint8]]
        content = self._rows[block].cpu().numpy() if self._bytes is None else self._bytes[block]
        return content

    def read_block(self, block: int) -> bytes:
        """Return a block's bytes as they are now."""
        return self.bytes_of(block).tobytes()

    def stage(self, blocks: Sequence[int]) -> None:
        """Make these blocks' content visible to readers of the region; returns when it is."""
        if self._staged is not None:
            for block in blocks:
                self._staged[block].copy_(self._rows[block])
