"""Owns the memory of keys and values.

The pool is block-major: one block, with all layers of its group, is one run of bytes, so moving a block is one copy.
The op layer defines the order within a block (`tandem_engine.ops.base`); its name is part of the layout.

    pool    [num_blocks, layers_per_block, 2 (keys, values), num_kv_heads * block_size * head_dim]
    region  | pool | padding to a page | generations: uint64 [num_blocks] |       one memfd, shared with readers

On a CPU the region is the pool. On CUDA the pool is device memory, and `stage` copies its blocks to the region; or the
pool lies in a `DeviceRegion`, which readers map.
"""

from __future__ import annotations

import math
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem_engine.execution.device_pool import ordinal_of, rows_of
from tandem_engine.execution.device_region import DeviceRegion
from tandem_engine.execution.kv_groups import LayerGroup
from tandem_engine.execution.regions import OwnedRegion
from tandem_engine.execution.thread_pool import parallel_for
from tandem_engine.layout import GroupInfo, LayoutInfo
from tandem_engine.ops.base import KVPool

_PAGE_BYTES = 4096
_GENERATION_BYTES = 8


@dataclass(frozen=True)
class KVGeometry:
    """The shape of one block."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    order: str = "layer,(key:head,dim,token|value:head,token,dim)"
    """`Ops.kv_order` of the op layer that writes the block."""
    groups: tuple[LayerGroup, ...] = ()
    """Layers that share a block table; empty: all layers share one."""

    @property
    def num_groups(self) -> int:
        return max(1, len(self.groups))

    @property
    def layers_per_block(self) -> int:
        return max((len(group.layers) for group in self.groups), default=self.num_layers)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """See `KVPool.places`."""
        of_layer = {
            layer: (number, index)
            for number, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        return tuple(of_layer[layer] for layer in sorted(of_layer))

    @property
    def bytes_per_block(self) -> int:
        numbers = (self.layers_per_block, 2, self.num_kv_heads, self.block_size, self.head_dim)
        return math.prod(numbers) * self.dtype.itemsize

    def layout(self) -> LayoutInfo:
        """Return the geometry in the form that other processes get."""
        return LayoutInfo(
            num_layers=self.num_layers,
            tokens_per_block=self.block_size,
            num_kv_heads=self.num_kv_heads,
            k_head_size=self.head_dim,
            v_head_size=self.head_dim,
            dtype=dtype_name(self.dtype),
            order=self.order,
            bytes_per_block=self.bytes_per_block,
            groups=[GroupInfo(list(group.layers), group.window) for group in self.groups],
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


class PagedKVCache:
    """Owns the KV tensors of one model in an engine process.

    With `staging` (needed by devices other than the CPU) the pool is a separate tensor and readers see copies. In a
    `device_region` the pool is the region, and readers see its memory.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_blocks: int,
        device: torch.device,
        *,
        staging: bool | None = None,
        device_region: DeviceRegion | None = None,
    ) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.device_region = device_region
        self.region_fds: tuple[int, ...]
        """One descriptor, or two as in `MapRegion`; this object owns them."""
        pool_bytes = num_blocks * geometry.bytes_per_block
        if device_region is not None:
            self.generations: MutableSequence[int] = device_region.generations
            self.region_bytes, self.region_fds, self.generations_offset = device_region.num_bytes, device_region.fds, 0
            self._staged = None
            self._use(rows_of(device_region, device, num_blocks, geometry.bytes_per_block))
            return
        self.generations_offset = -(-pool_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self.region = OwnedRegion(self.generations_offset + num_blocks * _GENERATION_BYTES)
        self.region_bytes, self.region_fds = self.region.num_bytes, (self.region.fd,)
        self.generations = self.region.uint64_table(self.generations_offset, num_blocks)
        shared = torch.from_numpy(self.region.bytes_at(0, pool_bytes)).view(num_blocks, geometry.bytes_per_block)
        is_staged = device.type != "cpu" if staging is None else staging
        self._staged = shared if is_staged else None
        self._use(torch.zeros_like(shared, device=device) if is_staged else shared)

    def _use(self, rows: torch.Tensor) -> None:
        """Take `rows`, [num_blocks, bytes_per_block], uint8, as the pool."""
        geometry = self.geometry
        self._rows = rows
        self._bytes = rows.numpy() if rows.device.type == "cpu" else None
        rows = rows.view(-1).view(geometry.dtype).view(self.num_blocks, -1)
        self.pool = KVPool(
            rows,
            geometry.layers_per_block,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.block_size,
            geometry.places,
        )

    @property
    def device(self) -> torch.device:
        return self._rows.device

    @property
    def ordinal(self) -> int:
        """The number of the pool's CUDA device; 0 for other devices."""
        return ordinal_of(self.device)

    def device_address(self, block: int) -> int | None:
        """Return the address of a block in device memory; None for a pool in host memory."""
        if self.device.type != "cuda" and self.device_region is None:
            return None
        return self._rows[block].data_ptr()

    def write_blocks(self, first: int, content: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Overwrite whole blocks from `first` on; `content` has their bytes and may be read-only."""
        size = self.geometry.bytes_per_block
        num_blocks = len(content) // size
        rows = self._rows[first : first + num_blocks].view(-1)
        if self.device.type == "cpu":
            here = rows.numpy()
            parallel_for(
                lambda start, end: np.copyto(here[start * size : end * size], content[start * size : end * size]),
                num_blocks,
                size,
            )
        else:
            rows.copy_(torch.from_numpy(content.copy()))

    def bytes_of(self, block: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return a block's bytes: a view of the pool on a CPU, else a copy."""
        content: np.ndarray[tuple[int], np.dtype[np.uint8]]
        content = self._rows[block].cpu().numpy() if self._bytes is None else self._bytes[block]
        return content

    def read_block(self, block: int) -> bytes:
        """Return a copy of a block's bytes."""
        return self.bytes_of(block).tobytes()

    def stage(self, blocks: Sequence[int]) -> None:
        """Make the content of blocks visible to readers of the region; returns after that."""
        if self._staged is not None:
            for block in blocks:
                self._staged[block].copy_(self._rows[block])
        elif self.device.type == "cuda" and blocks:
            torch.cuda.current_stream(self.device).synchronize()  # readers map the pool: its kernels must have ended
