"""Finds the order of the numbers in a block of vLLM's pool, in the names of `tandem_engine.execution.block_order`.

vLLM names the order of a block's heads and tokens. What a token's key and value look like inside is the business of the
attention backend: on a CPU it transposes the keys, and packs both by twos for AMX. So the backend itself writes known
numbers into a block, before the first request, and the order is the one by which they are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import torch

from tandem_engine.execution.block_order import BlockShape, keys_and_values

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values, [tokens, heads, dim] each, to slots of one layer; slot = block * tokens per block + place."""

_TRANSPOSED = (
    "layer,head,(key:dim,token|value:token,dim)",
    "layer,(key:head,dim,token|value:head,token,dim)",
)
_ORDERS = (
    *_TRANSPOSED,
    *(f"layer,{','.join(middle)},dim" for middle in permutations(("kv", "head", "token"))),
)
_BLOCK = 1
"""vLLM's block 0 stands for "no block"."""


def order_of(layers: Sequence[torch.Tensor], writes: Sequence[Write], shape: BlockShape) -> str | None:
    """Return the order of blocks with all layers one after another; None: it has no name here.

    `layers`: the pool, [num_blocks, ...] for each layer, with nothing in it; `writes` is the backend of each layer.
    `shape` is that of one layer.
    """
    found = {_order_of_layer(layer, write, shape) for layer, write in zip(layers, writes, strict=True)}
    return found.pop() if len(found) == 1 else None


def _order_of_layer(layer: torch.Tensor, write: Write, shape: BlockShape) -> str | None:
    if len(layer) <= _BLOCK or not layer[0].is_contiguous() or layer[0].numel() != shape.num_elements:
        return None
    keys, values = _known_numbers(shape, layer)
    slots = torch.arange(_BLOCK * shape.token, (_BLOCK + 1) * shape.token, device=layer.device)
    write(keys, values, slots)
    row = layer[_BLOCK].reshape(1, -1).clone()
    layer[_BLOCK] = 0
    for order in _ORDERS:
        views = keys_and_values(row, order, shape)  # [1, 1, heads, tokens, dim] each
        if all(
            torch.equal(view[0, 0].transpose(0, 1), known) for view, known in zip(views, (keys, values), strict=True)
        ):
            return order
    return None


def _known_numbers(shape: BlockShape, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, [tokens, heads, dim] each: small integers, which every dtype has, in a random order."""
    chance = torch.Generator().manual_seed(0)
    size = (2, shape.token, shape.head, shape.dim)
    numbers = torch.randint(1, 256, size, generator=chance).to(layer.dtype).to(layer.device)
    return numbers[0], numbers[1]
