"""Owns the memory of keys and values.

The pool is block-major: one block, with all layers of its group, is one run of bytes, so moving a block is one copy.
The op layer defines the order within a block (`tandem_engine.ops.base`); its name is part of the layout.

    pool    [num_blocks, layers_per_block, 2 (keys, values), num_kv_heads * block_size * head_dim]
    region  | slots | padding to a page | generations: uint64 [num_slots] |       one memfd, shared with readers

On a CPU the slots are the pool. Where others cannot read the pool, as on CUDA, the pool is private, and slots hold
copies of some of its blocks (`execution.staging`); or the pool lies in a `DeviceRegion`, which readers map.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from itertools import pairwise

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


class Slots:
    """A region of slots that other processes map."""

    def __init__(self, num_slots: int, bytes_per_slot: int) -> None:
        num_bytes = num_slots * bytes_per_slot
        self.num_slots = num_slots
        self.bytes_per_slot = bytes_per_slot
        self.generations_offset = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self.region = OwnedRegion(self.generations_offset + num_slots * _GENERATION_BYTES)
        self.generations: MutableSequence[int] = self.region.uint64_table(self.generations_offset, num_slots)
        """One per slot; whoever writes a slot adds one first."""
        self.rows = torch.from_numpy(self.region.bytes_at(0, num_bytes)).view(num_slots, bytes_per_slot)
        """uint8 [num_slots, bytes_per_slot]."""

    @property
    def num_bytes(self) -> int:
        """Of the region, generations included."""
        return self.region.num_bytes

    @property
    def fds(self) -> tuple[int, ...]:
        """The region's descriptor, which the region owns."""
        return (self.region.fd,)

    def bytes_of(self, slot: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return a view of a slot's bytes."""
        return self.region.bytes_at(slot * self.bytes_per_slot, self.bytes_per_slot)


class DeviceSlots:
    """A pool in device memory that other processes map: the same as `Slots`, with two descriptors."""

    generations_offset = 0
    """The generations have a descriptor of their own."""

    def __init__(self, region: DeviceRegion, device: torch.device, num_slots: int, bytes_per_slot: int) -> None:
        self.num_slots = num_slots
        self.bytes_per_slot = bytes_per_slot
        self.num_bytes = region.num_bytes
        self.fds: tuple[int, ...] = region.fds
        self.generations: MutableSequence[int] = region.generations
        self.rows = rows_of(region, device, num_slots, bytes_per_slot)
        self._region = region  # owns the descriptors

    def bytes_of(self, slot: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return a copy of a slot's bytes."""
        content: np.ndarray[tuple[int], np.dtype[np.uint8]] = self.rows[slot].cpu().numpy()
        return content


class PagedKVCache:
    """Owns the KV tensors of one model in an engine process."""

    def __init__(
        self,
        geometry: KVGeometry,
        num_blocks: int,
        device: torch.device,
        *,
        is_private: bool | None = None,
        device_region: DeviceRegion | None = None,
    ) -> None:
        """`is_private`: others cannot read the pool; None: on every device but the CPU.

        `device_region`: device memory for the pool, which others map.
        """
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.slots: Slots | DeviceSlots | None = None
        """The pool as a region; None: it is private."""
        if device_region is not None:
            self.slots = DeviceSlots(device_region, device, num_blocks, geometry.bytes_per_block)
            self.generations: MutableSequence[int] = self.slots.generations
            self._rows = self.slots.rows
        elif device.type != "cpu" if is_private is None else is_private:
            self.generations = array("Q", bytes(_GENERATION_BYTES * num_blocks))
            self._rows = torch.zeros(num_blocks, geometry.bytes_per_block, dtype=torch.uint8, device=device)
        else:
            self.slots = Slots(num_blocks, geometry.bytes_per_block)
            self.generations = self.slots.generations
            self._rows = self.slots.rows
        self._bytes = self._rows.numpy() if self._rows.device.type == "cpu" else None
        rows = self._rows.view(-1).view(geometry.dtype).view(num_blocks, -1)
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

    @property
    def region(self) -> OwnedRegion:
        """The pool as a region in host memory; for a pool that is one."""
        assert isinstance(self.slots, Slots), "this pool is private or in device memory"
        return self.slots.region

    @property
    def region_fds(self) -> tuple[int, ...]:
        """The descriptors of the pool as a region: one, or two as in `MapRegion`; this object owns them."""
        return self._public_slots.fds

    @property
    def region_bytes(self) -> int:
        """Of the pool as a region, generations included."""
        return self._public_slots.num_bytes

    def device_address(self, block: int) -> int | None:
        """Return the address of a block in device memory; None for a pool in host memory."""
        if self.device.type != "cuda" and not isinstance(self.slots, DeviceSlots):
            return None
        return self._rows[block].data_ptr()

    @property
    def generations_offset(self) -> int:
        """Of the pool as a region."""
        return self._public_slots.generations_offset

    @property
    def _public_slots(self) -> Slots | DeviceSlots:
        assert self.slots is not None, "others cannot read a private pool: it has no region"
        return self.slots

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

    def copy_to(self, rows: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to rows of another tensor, (block, row); on CUDA it returns before the copies have ended.

        `rows`: uint8 [num_rows, bytes_per_block]. Adjacent pairs are one copy.
        """
        breaks = [
            index
            for index in range(1, len(pairs))
            if pairs[index] != (pairs[index - 1][0] + 1, pairs[index - 1][1] + 1)
        ]
        for start, end in pairwise([0, *breaks, len(pairs)]):
            (block, row), num_rows = pairs[start], end - start
            rows[row : row + num_rows].copy_(self._rows[block : block + num_rows], non_blocking=True)
