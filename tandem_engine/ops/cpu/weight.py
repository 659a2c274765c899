"""Lays out a linear layer's weights for the C++ kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

from tandem_engine.ops.base import Weight
from tandem_engine.ops.cpu.library import Weights

TILE = 32
"""Outputs per tile; `kTile` in cpp/linear.hpp."""


@dataclass(frozen=True)
class CpuWeight:
    """Weights in tiles of 32 outputs, each [in_features, 32]; the last tile is padded with zeros."""

    in_features: int
    out_features: int
    tiles: torch.Tensor
    """[num_tiles, in_features, 32], float32, or bfloat16 with outputs i and 16 + i interleaved; contiguous."""
    bias: torch.Tensor
    """[num_tiles * 32], float32; zeros if the layer has no bias."""
    call: Weights = field(init=False, repr=False, compare=False)
    address: int = field(init=False, repr=False, compare=False)
    """The address of `call`."""

    def __post_init__(self) -> None:
        num_tiles = -(-self.out_features // TILE)
        expected = (num_tiles, self.in_features, TILE)
        if tuple(self.tiles.shape) != expected or tuple(self.bias.shape) != (num_tiles * TILE,):
            raise ValueError(
                f"packed weights are {tuple(self.tiles.shape)} with a bias of {tuple(self.bias.shape)}; "
                f"{self.out_features} outputs of {self.in_features} inputs make {expected} and {(num_tiles * TILE,)}"
            )
        if self.tiles.dtype not in (torch.float32, torch.bfloat16) or self.bias.dtype != torch.float32:
            raise ValueError(f"packed weights are {self.tiles.dtype} with a {self.bias.dtype} bias, see CpuWeight")
        if not self.tiles.is_contiguous() or not self.bias.is_contiguous():
            raise ValueError("packed weights are not contiguous")
        is_half = self.tiles.dtype == torch.bfloat16
        call = Weights(self.tiles.data_ptr(), self.bias.data_ptr(), self.in_features, self.out_features, is_half)
        object.__setattr__(self, "call", call)
        object.__setattr__(self, "address", ctypes.addressof(call))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"tiles": self.tiles, "bias": self.bias}


def own_weight(weight: Weight) -> CpuWeight:
    assert isinstance(weight, CpuWeight), "a weight is packed by the ops that use it"
    return weight


def pack(library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None) -> CpuWeight:
    """Copy `weight` [out_features, in_features] into tiles, on huge pages if the machine has them."""
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weights are {weight.dtype}; the CPU kernels take float32 and bfloat16")
    out_features, in_features = weight.shape
    rows = weight if weight.stride(1) == 1 else weight.contiguous()
    num_tiles = -(-out_features // TILE)
    tiles = torch.empty(num_tiles, in_features, TILE, dtype=weight.dtype)
    library.tandem_prefer_huge_pages(tiles.data_ptr(), tiles.nbytes)
    lay_out = library.tandem_pack_f32 if weight.dtype == torch.float32 else library.tandem_pack_bf16
    lay_out(rows.data_ptr(), rows.stride(0), out_features, in_features, tiles.data_ptr())
    padded = torch.zeros(num_tiles * TILE)
    if bias is not None:
        padded[:out_features] = bias
    return CpuWeight(in_features, out_features, tiles, padded)


def unpack(library: ctypes.CDLL, weight: CpuWeight) -> torch.Tensor:
    """Return the matrix that was packed, [out_features, in_features]."""
    rows = torch.empty(weight.out_features, weight.in_features, dtype=weight.tiles.dtype)
    lay_out = library.tandem_unpack_f32 if rows.dtype == torch.float32 else library.tandem_unpack_bf16
    lay_out(weight.tiles.data_ptr(), weight.out_features, weight.in_features, rows.data_ptr())
    return rows
