"""Describes to the C++ kernels where a step's tokens and a layer's keys and values lie."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from tandem_engine.ops.base import KVPool, QKNorm, Rotary, Step, StepArrays
from tandem_engine.ops.cpu.library import Cache, QKTransform, StepTable


@dataclass(frozen=True)
class CpuStep(Step):
    """A step in the kernels' layout."""

    call: StepTable
    """Points into the step's arrays."""
    address: int
    """The address of `call`."""


def step_of(arrays: StepArrays) -> CpuStep:
    """Return the step of one group of layers."""
    table = arrays.table
    assert table.dtype == np.int64 and table.flags.c_contiguous, "a step's numbers are int64 and contiguous"
    call = StepTable(
        *(arrays.positions.data_ptr(), arrays.slots.data_ptr(), len(arrays.positions)),
        *(table.ctypes.data, len(table), arrays.blocks.data_ptr()),
    )
    return CpuStep(*arrays, call, ctypes.addressof(call))


def own_step(step: Step) -> CpuStep:
    assert isinstance(step, CpuStep), "a step is made by the ops that run it"
    return step


def caches_of(pool: KVPool) -> list[Cache]:
    """Return the place of each layer's keys and values. Raises ValueError for a pool that the kernels cannot use."""
    rows = pool.rows
    if rows.dtype != torch.float32 or rows.stride(1) != 1:
        raise ValueError(f"the KV pool is {rows.dtype}; the CPU kernels take float32 and contiguous blocks")
    return [
        Cache(
            *(rows.data_ptr(), rows.stride(0), index * pool.elements_per_layer),
            *(pool.num_kv_heads, pool.head_dim, pool.block_size),
        )
        for index in range(pool.num_layers)
    ]


def qk_transform_of(rotary: Rotary | None, norm: QKNorm | None) -> QKTransform:
    """Return the `QKTransform` of both arguments; it points into their memory."""
    tables = (rotary.cos, rotary.sin) if rotary else ()
    norms = (norm.query, norm.key) if norm else ()
    for tensor in (*tables, *norms):
        assert tensor.dtype == torch.float32 and tensor.is_contiguous(), "tables and norms are float32 and contiguous"
    return QKTransform(
        *([tensor.data_ptr() for tensor in tables] or (None, None)),
        tables[0].shape[1] if tables else 0,
        *([tensor.data_ptr() for tensor in norms] or (None, None)),
        norm.eps if norm else 0.0,
    )
