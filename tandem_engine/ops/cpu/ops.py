"""Implements the op layer with the C++ kernels; their headers define what is computed in which order."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tandem_engine.ops.base import (
    Activation,
    EncoderActivation,
    EncoderLayerParts,
    HostBatch,
    KVPool,
    LayerNorm,
    LayerParts,
    QKNorm,
    Rotary,
    Step,
    Weight,
)
from tandem_engine.ops.cpu.encoder_layers import CpuEncoderLayers, checked_starts
from tandem_engine.ops.cpu.layers import CpuLayers
from tandem_engine.ops.cpu.library import (
    Cache,
    Kernels,
    QKTransform,
    arithmetic_name,
    load_kernels,
    load_library,
    set_num_threads,
)
from tandem_engine.ops.cpu.places import CpuStep, caches_of, own_step, qk_transform_of, step_of
from tandem_engine.ops.cpu.sampling import Sampler
from tandem_engine.ops.cpu.weight import CpuWeight, own_weight, pack, unpack
from tandem_engine.ops.sampling import RowSample, SamplingRow

_CPU = torch.device("cpu")
_MAX_QK_TRANSFORMS = 1024


def load_cpu_ops(
    folder: Path | None = None,
    num_threads: int = 1,
    machine_flags: Sequence[str] | None = None,
    cores: Sequence[int] = (),
) -> CpuOps:
    """Return the CPU's ops: the wheel's, or compiled by the first call on a machine in some seconds.

    `folder` keeps the compiled library; None: the user's cache. `machine_flags`: compile with them in any case.
    `cores`: see `set_num_threads`. Raises KernelsUnavailable; the torch ops work without a compiler.
    """
    if machine_flags is None:
        kernels = load_kernels(folder)
    else:
        kernels = Kernels(load_library(folder, machine_flags), f"compiled with {' '.join(machine_flags)}")
    ops = CpuOps(kernels.library, kernels.origin)
    ops.set_num_threads(num_threads, cores)
    return ops


class CpuOps:
    """`tandem_engine.ops.base.Ops` in C++. One thread calls; results do not depend on `num_threads`."""

    def __init__(self, library: ctypes.CDLL, origin: str = "") -> None:
        self._library = library
        self.origin = origin
        """Where the library comes from, for the log."""
        self._sampler = Sampler(library)
        self._name = arithmetic_name(library)
        self._pool: KVPool | None = None
        self._caches: list[Cache] = []
        self._qk_transforms: dict[tuple[int, int], tuple[int, QKTransform, Rotary | None, QKNorm | None]] = {}

    @property
    def library(self) -> ctypes.CDLL:
        """The C++ library, which has one thread pool for all its functions."""
        return self._library

    @property
    def name(self) -> str:
        """The name of the arithmetic: bits depend on the sources and on FMA, on no other feature of the machine."""
        return self._name

    @property
    def kv_order(self) -> str:
        return "layer,(key:head,dim,token|value:head,token,dim)"

    def set_num_threads(self, num_threads: int, cores: Sequence[int] = ()) -> None:
        """Compute with `num_threads` threads, the caller's included, from now on.

        With `cores`, one for each thread and the caller's first, the other threads are pinned to theirs. Torch is set
        to one thread: its threads would spin on the same cores between two of our ops.
        """
        set_num_threads(self._library, num_threads, cores)
        torch.set_num_threads(1)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CpuWeight:
        """Copy `weight` into tiles. Raises ValueError unless it is float32 or bfloat16."""
        return pack(self._library, weight, bias)

    def unpack(self, weight: Weight) -> torch.Tensor:
        return unpack(self._library, own_weight(weight))

    def packed(self, in_features: int, out_features: int, tensors: dict[str, torch.Tensor]) -> CpuWeight:
        """Return the weight of `tensors`. Raises ValueError if their sizes do not match."""
        return CpuWeight(in_features, out_features, tensors["tiles"], tensors["bias"])

    def rows(self, weight: Weight, indices: torch.Tensor) -> torch.Tensor:
        own = own_weight(weight)
        indices = indices.contiguous()
        y = torch.empty(len(indices), own.in_features)
        embed = self._library.tandem_embed_f32 if own.tiles.dtype == torch.float32 else self._library.tandem_embed_bf16
        embed(indices.data_ptr(), len(indices), own.tiles.data_ptr(), own.in_features, y.data_ptr())
        return y

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        own = own_weight(weight)
        x, stride = _rows(x)
        num_tokens, features = x.shape
        assert features == own.in_features, "x and weight disagree about the features"
        y = torch.empty(num_tokens, own.out_features)
        self._library.tandem_linear(x.data_ptr(), stride, num_tokens, own.address, y.data_ptr())
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, stride = _rows(x)
        return self._normed(x, stride, None, 0, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert x.dtype == torch.float32 and x.stride(1) == 1 and x.shape == more.shape, "`x` is summed up in place"
        more, more_stride = _rows(more)
        return self._normed(x, x.stride(0), more.data_ptr(), more_stride, weight, eps)

    def _normed(
        self, x: torch.Tensor, stride: int, more: int | None, more_stride: int, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        assert weight.dtype == torch.float32, "a norm's weight is float32"
        num_tokens, features = x.shape
        y = torch.empty(num_tokens, features)
        self._library.tandem_rms_norm(
            *(x.data_ptr(), stride, more, more_stride, num_tokens, features),
            *(weight.data_ptr(), eps, y.data_ptr()),
        )
        return y

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate_up, stride = _rows(gate_up)
        num_tokens, both = gate_up.shape
        y = torch.empty(num_tokens, both // 2)
        gate = self._library.tandem_silu_gated if activation == "silu" else self._library.tandem_gelu_tanh_gated
        gate(gate_up.data_ptr(), stride, num_tokens, both // 2, y.data_ptr())
        return y

    def step(self, batch: HostBatch) -> CpuStep:
        steps = [step_of(of_group) for of_group in batch.on(_CPU)]
        return replace(steps[0], groups=steps) if len(steps) > 1 else steps[0]

    def rope_and_kv_write(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        step: Step,
        pool: KVPool,
        layer: int,
        rotary: Rotary | None,
        norm: QKNorm | None = None,
    ) -> torch.Tensor:
        """Return a view of `qkv`."""
        assert qkv.stride(1) == 1 and qkv.dtype == torch.float32, "qkv is rotated in place"
        self._library.tandem_rope_and_kv_write(
            *(qkv.data_ptr(), qkv.stride(0), num_heads),
            *(self._qk_transform(rotary, norm), own_step(step).address, self._cache(pool, layer)),
        )
        return qkv[:, : num_heads * pool.head_dim]

    def kv_write(self, key: torch.Tensor, value: torch.Tensor, step: Step, pool: KVPool, layer: int) -> None:
        key, value = (
            x if x.stride(2) == 1 and x.dtype == torch.float32 else x.float().contiguous() for x in (key, value)
        )
        self._library.tandem_kv_write(
            *(key.data_ptr(), key.stride(0), key.stride(1)),
            *(value.data_ptr(), value.stride(0), value.stride(1)),
            *(own_step(step).address, self._cache(pool, layer)),
        )

    def paged_attention(
        self,
        query: torch.Tensor,
        num_heads: int,
        step: Step,
        pool: KVPool,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        query, stride = _rows(query)
        out = torch.empty(query.shape)
        self._library.tandem_paged_attention(
            *(query.data_ptr(), stride, out.data_ptr(), num_heads),
            *(own_step(step).address, self._cache(pool, layer), window or 0, scale, softcap or 0.0),
        )
        return out

    def layers(self, layers: Sequence[LayerParts]) -> CpuLayers | None:
        return CpuLayers(self._library, layers) if all(layer.gate_up and layer.down for layer in layers) else None

    def layer_norm(self, x: torch.Tensor, norm: LayerNorm, more: torch.Tensor | None = None) -> torch.Tensor:
        assert more is None or (x.dtype == torch.float32 and x.stride(1) == 1), "`x` is summed up in place"
        x, stride = _rows(x)
        added, more_stride = (None, 0) if more is None else _rows(more)
        y = torch.empty(x.shape)
        self._library.tandem_layer_norm(
            *(x.data_ptr(), stride, None if added is None else added.data_ptr(), more_stride, *x.shape),
            *(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps, y.data_ptr()),
        )
        return y

    def activate(self, x: torch.Tensor, activation: EncoderActivation) -> torch.Tensor:
        x, stride = _rows(x)
        y = torch.empty(x.shape)
        run = self._library.tandem_gelu if activation == "gelu" else self._library.tandem_gelu_tanh
        run(x.data_ptr(), stride, *x.shape, y.data_ptr())
        return y

    def self_attention(self, qkv: torch.Tensor, num_heads: int, starts: torch.Tensor, scale: float) -> torch.Tensor:
        assert qkv.dtype == torch.float32 and qkv.is_contiguous(), "qkv is float32, in one piece"
        checked_starts(starts, len(qkv))
        width = qkv.shape[1] // 3
        out = torch.empty(len(qkv), width)
        self._library.tandem_self_attention(
            *(qkv.data_ptr(), num_heads, width // num_heads),
            *(starts.data_ptr(), len(starts) - 1, scale, out.data_ptr()),
        )
        return out

    def encoder_layers(self, layers: Sequence[EncoderLayerParts]) -> CpuEncoderLayers:
        return CpuEncoderLayers(self._library, layers)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[RowSample]:
        return self._sampler.sample(logits, rows)

    def _cache(self, pool: KVPool, layer: int) -> int:
        """Return the address of the layer's `Cache`; the caches are made once per pool."""
        if pool is not self._pool:
            self._caches = caches_of(pool)
            self._pool = pool
        return ctypes.addressof(self._caches[layer])

    def _qk_transform(self, rotary: Rotary | None, norm: QKNorm | None) -> int:
        """Return the address of the `QKTransform` of both arguments, which is made once."""
        name = (id(rotary), id(norm))
        if name not in self._qk_transforms:
            if len(self._qk_transforms) >= _MAX_QK_TRANSFORMS:  # a caller that makes new tables all the time
                self._qk_transforms.clear()
            transform = qk_transform_of(rotary, norm)
            # Keeps both alive, so that their ids stay unique.
            self._qk_transforms[name] = (ctypes.addressof(transform), transform, rotary, norm)
        return self._qk_transforms[name][0]


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return `x` with contiguous rows, and the distance between its rows."""
    assert x.dtype == torch.float32, "activations are float32"
    stride, step = x.stride()
    if step == 1:
        return x, stride
    x = x.contiguous()
    return x, x.shape[1]
