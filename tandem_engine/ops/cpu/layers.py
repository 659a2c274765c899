"""Runs all layers of a model in C++ without returning to Python between ops; see cpp/layers.hpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from tandem_engine.ops.base import KVPool, LayerParts, Step
from tandem_engine.ops.cpu.library import Cache, DenseLayer, QKTransform
from tandem_engine.ops.cpu.places import caches_of, own_step, qk_transform_of
from tandem_engine.ops.cpu.weight import own_weight


class CpuLayers:
    """`tandem_engine.ops.base.Layers` in C++, for dense layers only."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[LayerParts]) -> None:
        self._library = library
        self._parts = list(layers)
        self._qk_transforms = [qk_transform_of(layer.rotary, layer.head_norm) for layer in layers]
        self._pool: KVPool | None = None
        self._caches: list[Cache] = []
        self._table = (DenseLayer * len(self._parts))(*map(_described, self._parts, self._qk_transforms))
        self._address = ctypes.addressof(self._table)
        self._last = ctypes.addressof(self._table[len(self._parts) - 1])
        self._width = layers[-1].output.in_features

    def forward(
        self, x: torch.Tensor, step: Step, pool: KVPool, rows: torch.Tensor, kv_written: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.dtype == torch.float32 and x.is_contiguous() and len(x) == len(step.positions), "x is overwritten"
        assert rows.dtype == torch.int64 and rows.is_contiguous(), "rows are int64, in one piece"
        if pool is not self._pool:
            self._use(pool)
        groups = [own_step(group) for group in step.groups or (step,)]
        steps = (ctypes.c_void_p * len(groups))(*(group.address for group in groups))
        queries = torch.empty(len(rows), self._width)
        sampled = (rows.data_ptr(), len(rows), queries.data_ptr())
        self._library.tandem_layers(self._address, len(self._parts), steps, x.data_ptr(), *sampled)
        kv_written()
        x = x.index_select(0, rows)
        more = torch.empty_like(x)
        if len(rows):
            self._library.tandem_finish_layer(self._last, steps, *sampled, x.data_ptr(), more.data_ptr())
        return x, more

    def _use(self, pool: KVPool) -> None:
        self._caches = caches_of(pool)
        places = pool.places or [(0, index) for index in range(len(self._parts))]
        for layer, (group, index) in zip(self._table, places, strict=True):
            layer.group, layer.cache = group, ctypes.addressof(self._caches[index])
        self._pool = pool


def _described(layer: LayerParts, transform: QKTransform) -> DenseLayer:
    linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
    projections = (layer.projection_norm.query, layer.projection_norm.key) if layer.projection_norm else (None, None)
    norms = (layer.input_norm, layer.attention_output_norm, layer.mlp_norm, layer.mlp_output_norm, *projections)
    return DenseLayer(
        *(own_weight(weight).address for weight in linears if weight is not None),
        *(_address(norm) for norm in norms),
        *(ctypes.addressof(transform), None, 0),
        *(layer.num_heads, layer.window or 0, layer.activation == "gelu_tanh"),
        *(layer.eps, layer.scale, layer.softcap or 0.0),
    )


def _address(norm: torch.Tensor | None) -> int | None:
    if norm is None:
        return None
    assert norm.dtype == torch.float32 and norm.is_contiguous(), "a norm's weight is float32, in one piece"
    return norm.data_ptr()
