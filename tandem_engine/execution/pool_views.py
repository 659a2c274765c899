"""Views a pool's keys and values by block, layer, head, token and dim, whatever their order in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tandem_engine.execution.block_order import BlockShape, keys_and_values
from tandem_engine.execution.kv_cache import PagedKVCache


@dataclass(frozen=True)
class LayerViews:
    """Some layers of a pool that lie in one tensor."""

    first: int
    """Of the layers, counted in a block."""
    keys: torch.Tensor  # [num_blocks, layers, heads, tokens, dim]
    values: torch.Tensor

    @property
    def layers(self) -> slice:
        return slice(self.first, self.first + self.keys.shape[1])


@dataclass(frozen=True)
class PoolViews:
    """The blocks of a pool, as views that write through."""

    shape: BlockShape
    parts: Sequence[LayerViews]

    @property
    def device(self) -> torch.device:
        return self.parts[0].keys.device


def views_of_pool(cache: PagedKVCache) -> PoolViews:
    """Return the views of a pool of our own, whose blocks have all layers."""
    pool = cache.pool
    shape = BlockShape(pool.num_layers, pool.num_kv_heads, pool.block_size, pool.head_dim)
    return PoolViews(shape, [LayerViews(0, *keys_and_values(pool.rows, cache.geometry.order, shape))])


def views_of_layers(layers: Sequence[torch.Tensor], order: str, shape: BlockShape) -> PoolViews:
    """Return the views of a pool with one tensor per layer.

    `layers`: [num_blocks, ...] each, whose blocks are contiguous, in the dtype of the numbers. `order` is that of a
    block that has all layers one after another. Raises ValueError for an unknown order, and if its first dimension is
    not the layer.
    """
    if not order.startswith("layer,"):
        raise ValueError(f"{order!r} does not have one layer after another")
    of_one = replace(shape, layer=1)
    rows = (layer.as_strided((len(layer), layer[0].numel()), (layer.stride(0), 1)) for layer in layers)
    return PoolViews(shape, [LayerViews(i, *keys_and_values(each, order, of_one)) for i, each in enumerate(rows)])
