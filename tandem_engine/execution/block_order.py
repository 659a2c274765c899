"""Reads the name of an order of the numbers in a KV block, and views blocks by it.

order      dimensions, the slowest first: layer, kv (keys, then values), head, token, dim
example    "layer,kv,head,token,dim"
brackets   an order for keys and one for values, of the dimensions inside kv:
           "layer,(key:head,dim,token|value:head,token,dim)"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_DIMENSIONS = ("layer", "head", "token", "dim")
"""In the order of the views."""


@dataclass(frozen=True)
class BlockShape:
    """The numbers of a block along each dimension; the keys and the values are two."""

    layer: int
    head: int
    token: int
    dim: int

    @property
    def num_elements(self) -> int:
        return 2 * self.layer * self.head * self.token * self.dim


def keys_and_values(rows: torch.Tensor, order: str, shape: BlockShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and the values of blocks, [num_blocks, layers, heads, tokens, dim] each, as views.

    `rows` [num_blocks, elements], contiguous in a row. Raises ValueError for the name of an unknown order.
    """
    of_keys, of_values = (_strides(dimensions, shape) for dimensions in _read(order))
    size = (len(rows), *(getattr(shape, name) for name in _DIMENSIONS))

    def view(strides: dict[str, int], start: int) -> torch.Tensor:
        in_block = (strides[name] for name in _DIMENSIONS)
        return rows.as_strided(size, (rows.stride(0), *in_block), rows.storage_offset() + start)

    return view(of_keys, 0), view(of_values, of_values["kv"])


def _read(order: str) -> tuple[list[str], list[str]]:
    """Return the dimensions of keys and of values, kv among them."""
    outer, _, inner = order.partition("(")
    common = [name for name in outer.split(",") if name]
    if not inner:
        both = common, common
    else:
        key, _, value = inner.removesuffix(")").partition("|")
        both = ([*common, "kv", *_named(key, "key")], [*common, "kv", *_named(value, "value")])
    if any(sorted(dimensions) != sorted((*_DIMENSIONS, "kv")) for dimensions in both):
        raise ValueError(f"{order!r} is no order of layer, kv, head, token and dim")
    return both


def _named(text: str, name: str) -> list[str]:
    found, _, dimensions = text.partition(":")
    return dimensions.split(",") if found == name else []


def _strides(dimensions: Sequence[str], shape: BlockShape) -> dict[str, int]:
    strides, stride = {}, 1
    for name in reversed(dimensions):
        strides[name] = stride
        stride *= 2 if name == "kv" else getattr(shape, name)
    return strides
