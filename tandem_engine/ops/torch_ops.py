"""Implements the op layer in plain torch, for any device.

A row's bits do not depend on the rows beside it. Torch rounds a matrix product by its shape, so `linear` runs all rows
through products of one shape, padded with zeros. Small steps pay most: on a CPU a decode step of one request takes as
long as a step of 32.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

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
from tandem_engine.ops.plain_sampling import sample
from tandem_engine.ops.rowwise import gelu, gelu_tanh, silu
from tandem_engine.ops.sampling import RowSample, SamplingRow
from tandem_engine.ops.torch_attention import AttentionCall, TorchStep, attend
from tandem_engine.ops.torch_self_attention import attend_to_all

_CPU_TILE = 32
_CUDA_TILE = 128
"""Roughly where a GPU's products change from memory-bound to compute-bound, so that padding a decode costs little."""
_SLAB = 4096
"""Output features per product; a bf16 weight is widened one slab at a time."""


@dataclass(frozen=True)
class TorchWeight:
    """A linear layer's weights in the checkpoint's layout."""

    weight: torch.Tensor
    """[out_features, in_features]."""
    bias: torch.Tensor | None
    """[out_features], float32."""

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}


class TorchOps:
    """The op layer in plain torch."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self._tile = _CPU_TILE if self.device.type == "cpu" else _CUDA_TILE
        self._widened = torch.empty(0)

    @property
    def name(self) -> str:
        """The name of the arithmetic: float32 on a CPU, the weights' dtype in a GPU's linear layers; numpy samples."""
        version = torch.__version__.split("+")[0]
        where, dtype = self.device.type, "weights-dtype"
        if self.device.type == "cpu":
            where, dtype = f"cpu-{_processor()}-{torch.backends.cpu.get_cpu_capability().lower()}", "float32"
        return f"torch-{version}/{where}/{dtype}/tile{self._tile}/numpy-{np.__version__}"

    @property
    def library(self) -> ctypes.CDLL | None:
        return None

    @property
    def kv_order(self) -> str:
        return "layer,(key:head,dim,token|value:head,token,dim)"

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> TorchWeight:
        """Return the weight as it is; the caller gives up the matrix."""
        assert weight.dtype in (torch.float32, torch.bfloat16), "the loader stores nothing else"
        return TorchWeight(weight.contiguous(), None if bias is None else bias.float())

    def unpack(self, weight: Weight) -> torch.Tensor:
        return weight.tensors["weight"]

    def packed(self, in_features: int, out_features: int, tensors: dict[str, torch.Tensor]) -> TorchWeight:
        weight = TorchWeight(tensors["weight"], tensors.get("bias"))
        assert (weight.in_features, weight.out_features) == (in_features, out_features), "a cache file of other sizes"
        return weight

    def rows(self, weight: Weight, indices: torch.Tensor) -> torch.Tensor:
        return functional.embedding(indices, weight.tensors["weight"]).float()

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Return x W^T + bias, computed `tile` rows and `_SLAB` features at a time."""
        matrix, bias = weight.tensors["weight"], weight.tensors.get("bias")
        if len(x) == 0:
            return x.new_empty(0, len(matrix))
        tiles = torch.split(functional.pad(self._operand(x, matrix), (0, 0, 0, -len(x) % self._tile)), self._tile)
        output = torch.empty(len(tiles) * self._tile, len(matrix), dtype=tiles[0].dtype, device=x.device)
        for first in range(0, len(matrix), _SLAB):
            slab = self._slab(matrix, first)
            for rows, place in zip(tiles, torch.split(output, self._tile), strict=True):
                torch.mm(rows, slab.t(), out=place[:, first : first + len(slab)])
        result = output[: len(x)].float()
        return result if bias is None else result.add_(bias)

    def _operand(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return x if self.device.type == "cpu" else x.to(matrix.dtype)

    def _slab(self, matrix: torch.Tensor, first: int) -> torch.Tensor:
        """Return one slab of output features from `first` on, in the arithmetic's dtype; valid until the next call."""
        slab = matrix[first : first + _SLAB]
        if self.device.type != "cpu" or slab.dtype == torch.float32:
            return slab
        if self._widened.numel() < slab.numel():
            self._widened = torch.empty(slab.numel())
        return self._widened[: slab.numel()].view(slab.shape).copy_(slab)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        mean_square = x.square().sum(-1, keepdim=True).div_(x.shape[-1])
        return x / mean_square.add_(eps).sqrt_() * weight

    def add_rms_norm(self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.rms_norm(x.add_(more), weight, eps)

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        activated = silu(gate) if activation == "silu" else gelu_tanh(gate)
        return activated.mul_(up)

    def step(self, batch: HostBatch) -> Step:
        steps = [TorchStep(*of_group) for of_group in batch.on(self.device)]
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
        heads = qkv.view(len(qkv), -1, pool.head_dim)  # [num_tokens, heads, head_dim]
        query, key, value = torch.split(heads, [num_heads, pool.num_kv_heads, pool.num_kv_heads], 1)
        if norm is not None:
            query, key = (self.rms_norm(x, w, norm.eps) for x, w in ((query, norm.query), (key, norm.key)))
        if rotary is not None:
            cos, sin = (table.index_select(0, step.positions).unsqueeze(1) for table in (rotary.cos, rotary.sin))
            query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        self.kv_write(key, value, step, pool, layer)
        return query.flatten(1)

    def kv_write(self, key: torch.Tensor, value: torch.Tensor, step: Step, pool: KVPool, layer: int) -> None:
        blocks = torch.div(step.slots, pool.block_size, rounding_mode="floor")
        places = step.slots % pool.block_size
        of_layer = pool.rows.view(len(pool.rows), pool.num_layers, 2, -1)[:, layer]
        keys = of_layer[:, 0].view(-1, pool.num_kv_heads, pool.head_dim, pool.block_size)
        values = of_layer[:, 1].view(-1, pool.num_kv_heads, pool.block_size, pool.head_dim)
        keys[blocks, :, :, places] = key.to(keys.dtype)
        values[blocks, :, places] = value.to(values.dtype)

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
        assert isinstance(step, TorchStep), "a step is made by the ops that run it"
        return attend(query.float(), step, pool, layer, AttentionCall(num_heads, scale, window, softcap))

    def layers(self, layers: Sequence[LayerParts]) -> None:
        """Return None: this backend runs layers op by op."""

    def layer_norm(self, x: torch.Tensor, norm: LayerNorm, more: torch.Tensor | None = None) -> torch.Tensor:
        if more is not None:
            x.add_(more)
        off = x - x.sum(-1, keepdim=True).div_(x.shape[-1])
        variance = off.square().sum(-1, keepdim=True).div_(x.shape[-1])
        return off.div_(variance.add_(norm.eps).sqrt_()).mul_(norm.weight).add_(norm.bias)

    def activate(self, x: torch.Tensor, activation: EncoderActivation) -> torch.Tensor:
        return gelu(x) if activation == "gelu" else gelu_tanh(x)

    def self_attention(self, qkv: torch.Tensor, num_heads: int, starts: torch.Tensor, scale: float) -> torch.Tensor:
        return attend_to_all(qkv, num_heads, starts, scale)

    def encoder_layers(self, layers: Sequence[EncoderLayerParts]) -> None:
        """Return None: this backend runs layers op by op."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[RowSample]:
        return sample(logits, rows)


def _processor() -> str:
    """Return vendor, family and model: MKL, which computes torch's products, chooses its kernels by them."""
    file = Path("/proc/cpuinfo")
    first = file.read_text().split("\n\n")[0].splitlines() if file.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first)}
    known = [facts[name] for name in ("vendor_id", "cpu family", "model") if name in facts]
    return "-".join(known) or platform.machine()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first dimensions of `x` [num_tokens, heads, head_dim] by tables [num_tokens, 1, rotary_dim / 2]."""
    half = cos.shape[-1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
