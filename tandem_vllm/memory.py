"""Copies blocks between vLLM's pool, the region that others read, and the regions of others.

    vLLM's pool   a tensor per layer, each with its part of every block
    a slot        a block of all layers, one layer after another

This module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from tandem_engine.errors import RegionError
from tandem_engine.execution.block_converter import BlockConverter
from tandem_engine.execution.block_order import BlockShape
from tandem_engine.execution.kv_cache import Slots
from tandem_engine.execution.mapped_regions import MappedRegions
from tandem_engine.execution.pool_views import views_of_layers
from tandem_engine.execution.regions import Bytes
from tandem_engine.extents import BlockPart, ExtentRef
from tandem_engine.layout import LayoutInfo, SourceLayout
from tandem_engine.messages import MapRegion

if TYPE_CHECKING:
    from tandem_engine.execution.block_checksums import BlockChecksums


class BlockMemory:
    """Implements `tandem_vllm.blocks.Memory`, and `tandem_engine.staging.SlotMemory` for the slots of a region."""

    def __init__(self, region_id: str, layers: Sequence[torch.Tensor], slots: Slots, layout: LayoutInfo) -> None:
        """`layers`: [num_blocks, ...] each, in the order of the model's layers. Raises ValueError."""
        self.region_id = region_id
        self.num_slots = slots.num_slots
        self.generations = slots.generations
        self.regions = MappedRegions()
        self.checksums_of: BlockChecksums | None = None
        """None: this engine computes and compares no checksums."""
        self._slots = slots
        self._layers = [_rows(layer) for layer in layers]  # uint8 [num_blocks, bytes of a block in this layer]
        # The same memory for numpy, if it is a CPU's: torch takes some microseconds for each row, numpy half of one.
        self._arrays = [rows.numpy() if rows.device.type == "cpu" else None for rows in self._layers]
        self._ends = np.cumsum([rows.shape[1] for rows in self._layers]).tolist()
        self._num_copied = 0
        self._order = layout.order
        self._converter = _converter(layers, layout, self.regions)

    @property
    def bytes_per_block(self) -> int:
        return int(self._ends[-1])

    def start_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to slots, (block, slot); the copies have ended when this returns."""
        region = self._slots.rows.numpy()
        blocks, slots = (np.array(numbers) for numbers in zip(*pairs, strict=True))
        for rows, array, start, end in self._of_layers():
            if array is not None:
                region[slots, start:end] = array[blocks]
            else:
                region[slots, start:end] = rows[torch.from_numpy(blocks).to(rows.device)].cpu().numpy()
        self._num_copied += len(pairs)

    def take_copied(self, *, wait: bool = False) -> int:
        taken, self._num_copied = self._num_copied, 0
        return taken

    def checksums(self, slots: Sequence[int]) -> list[int]:
        return self.checksums_of.of(slots) if self.checksums_of is not None else []

    def map_region(self, command: MapRegion, *fds: int) -> None:
        """Map a region of others; raises RegionError."""
        self.regions.map(command, *fds)

    def unmap_region(self, region_id: str) -> None:
        self.regions.unmap(region_id)

    def import_blocks(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> int:
        for extent in extents:
            if extent.num_bytes != self.bytes_per_block:
                raise RegionError(
                    f"slot {extent.slot} of region {extent.region_id} has {extent.num_bytes} bytes, "
                    f"a block here {self.bytes_per_block}; both workers must serve the same layout"
                )
        for block, extent in zip(blocks, extents, strict=True):
            self.write(block, self.regions.read(extent))
        self.regions.check_generations(extents)
        if self.checksums_of is not None:
            self.checksums_of.verify_copies([self.read(block) for block in blocks], extents)
        return len(extents) * self.bytes_per_block

    def convert_blocks(
        self, parts: Sequence[Sequence[BlockPart]], extents: Sequence[ExtentRef], layout: SourceLayout
    ) -> int:
        if self._converter is None:
            raise RegionError(
                f"KV blocks of another layout cannot be converted to the order {self._order}: it is vLLM's alone; give "
                'this model exactness "class", then its workers exchange blocks with their like only'
            )
        content = self._converter.read(extents, layout)
        if self.checksums_of is not None:
            self.checksums_of.verify_copies(list(content), extents)
        self._converter.write(content, layout, parts)
        return content.size

    def read(self, block: int) -> Bytes:
        content: Bytes = torch.cat([rows[block] for rows in self._layers]).cpu().numpy()
        return content

    def write(self, block: int, content: Bytes) -> None:
        """Overwrite a block; `content` may be read-only."""
        for rows, array, start, end in self._of_layers():
            if array is not None:
                array[block] = content[start:end]
            else:
                rows[block] = torch.from_numpy(content[start:end].copy()).to(rows.device)

    def _of_layers(self) -> Iterator[tuple[torch.Tensor, Bytes | None, int, int]]:
        """Yield each layer's rows, and the first and last byte of its part of a block."""
        return zip(self._layers, self._arrays, [0, *self._ends[:-1]], self._ends, strict=True)


def _rows(layer: torch.Tensor) -> torch.Tensor:
    """View a layer's part of the pool by the bytes of its blocks; raises ValueError if blocks are not whole runs."""
    if not layer[0].is_contiguous() or layer.stride(0) != layer[0].numel():
        raise ValueError(
            f"vLLM's pool has blocks with strides {layer.stride()} for {tuple(layer.shape)}: they cannot be handed "
            "over as they are; choose another attention backend with --engine-args"
        )
    return layer.view(torch.uint8).view(len(layer), -1)


def _converter(layers: Sequence[torch.Tensor], layout: LayoutInfo, regions: MappedRegions) -> BlockConverter | None:
    """Return what writes blocks of other layouts into the pool; None: its order has no name that others know."""
    if layout.order.startswith("vllm-"):
        return None
    shape = BlockShape(layout.num_layers, layout.num_kv_heads, layout.tokens_per_block, layout.k_head_size)
    return BlockConverter(views_of_layers(layers, layout.order, shape), regions)
