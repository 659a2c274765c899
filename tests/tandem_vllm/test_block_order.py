"""Tests that the order of vLLM's blocks is read off what its attention backend writes."""

from __future__ import annotations

import pytest
import torch

from tandem_engine.execution.block_order import BlockShape, keys_and_values
from tandem_vllm.block_order import Write, order_of

SHAPE = BlockShape(layer=1, head=2, token=32, dim=8)
CPU = "layer,head,(key:dim,token|value:token,dim)"
"""vLLM's kernels "vec" and "vec16"."""
NVIDIA = "layer,head,token,kv,dim"


def new_layer(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(3, SHAPE.head, SHAPE.token, 2 * SHAPE.dim, dtype=dtype)


def backend(layer: torch.Tensor, order: str) -> Write:
    """Return what a backend does that stores numbers in that order."""

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        views = keys_and_values(layer.view(len(layer), -1), order, SHAPE)
        for view, numbers in zip(views, (keys, values), strict=True):
            for token, slot in zip(numbers, slots.tolist(), strict=True):
                view[slot // SHAPE.token, 0, :, slot % SHAPE.token] = token

    return write


def amx(layer: torch.Tensor) -> Write:
    """Return a backend that interleaves two tokens of a value, as AMX reads them."""

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        backend(layer, CPU)(keys, values, slots)
        of_values = layer[1].view(SHAPE.head, 2, -1)[:, 1]  # [heads, tokens * dim]
        pairs = of_values.view(SHAPE.head, SHAPE.token // 2, 2, SHAPE.dim).transpose(2, 3)
        of_values.copy_(pairs.reshape(SHAPE.head, -1))

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [CPU, NVIDIA, "layer,token,head,kv,dim", "layer,kv,head,token,dim"])
def test_the_order_is_found_and_the_pool_is_left_empty(order: str, dtype: torch.dtype) -> None:
    layers = [new_layer(dtype) for _ in range(2)]
    assert order_of(layers, [backend(layer, order) for layer in layers], SHAPE) == order
    assert not any(layer.any() for layer in layers)


def test_an_order_without_a_name_is_none() -> None:
    layer = new_layer()
    assert order_of([layer], [amx(layer)], SHAPE) is None


def test_layers_of_two_orders_are_none() -> None:
    layers = new_layer(), new_layer()
    assert order_of(layers, [backend(layers[0], CPU), backend(layers[1], NVIDIA)], SHAPE) is None


def test_blocks_that_are_not_whole_runs_are_none() -> None:
    layer = torch.zeros(SHAPE.head, 3, SHAPE.token, 2 * SHAPE.dim).transpose(0, 1)  # LHBNC

    def write(*_: torch.Tensor) -> None:
        raise AssertionError("nothing is written where nothing can be read")

    assert order_of([layer], [write], SHAPE) is None
