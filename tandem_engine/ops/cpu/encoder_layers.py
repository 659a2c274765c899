"""Runs all layers of an encoder in C++ without returning to Python between ops; see cpp/encoder.hpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import torch

from tandem_engine.ops.base import EncoderLayerParts
from tandem_engine.ops.cpu.library import EncoderLayer
from tandem_engine.ops.cpu.weight import own_weight


class CpuEncoderLayers:
    """`tandem_engine.ops.base.EncoderLayers` in C++; overwrites its input."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[EncoderLayerParts]) -> None:
        self._library = library
        self._parts = list(layers)  # own the memory that the table points into
        self._table = (EncoderLayer * len(self._parts))(*map(_described, self._parts))

    def forward(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32 and x.is_contiguous(), "x is overwritten"
        checked_starts(starts, len(x))
        table = ctypes.addressof(self._table)
        self._library.tandem_encoder_layers(table, len(self._parts), starts.data_ptr(), len(starts) - 1, x.data_ptr())
        return x


def checked_starts(starts: torch.Tensor, num_tokens: int) -> None:
    """Assert what the kernels rely on: the runs, each of one token or more, cover all tokens."""
    assert starts.dtype == torch.int64 and starts.is_contiguous(), "starts are int64, in one piece"
    bounds = starts.tolist()
    assert bounds[0] == 0 and bounds[-1] == num_tokens, "runs cover all tokens"
    assert all(first < end for first, end in pairwise(bounds)), "a run has tokens"


def _described(layer: EncoderLayerParts) -> EncoderLayer:
    norms = (layer.attention_norm, layer.mlp_norm)
    assert norms[0].eps == norms[1].eps, "one epsilon for both norms of a layer"
    vectors = [vector for norm in norms for vector in (norm.weight, norm.bias)]
    assert all(vector.dtype == torch.float32 and vector.is_contiguous() for vector in vectors), "norms are float32"
    return EncoderLayer(
        *(own_weight(weight).address for weight in (layer.qkv, layer.output, layer.up, layer.down)),
        *(vector.data_ptr() for vector in vectors),
        *(layer.num_heads, layer.activation == "gelu_tanh", norms[0].eps, layer.scale),
    )
