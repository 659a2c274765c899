"""Defines the op layer: what a backend must compute for any model to run on it.

Every op is row-wise: a row of its result depends on that row of its input alone, summed in an order that neither the
number of rows nor the number of threads changes (law 3). Tokens of all runs of a step lie one after the other in one
flat dimension, prefill chunks and decodes alike.

    x           [num_tokens, features], float32; stride(0) may be larger than `features`, stride(1) is 1
    KV block    of each layer: keys [num_kv_heads, head_dim, block_size],
                then values [num_kv_heads, block_size, head_dim]

Keys are transposed inside their block so that one vector holds one dimension of 16 tokens' keys (measured: half the
time of token-major keys on a CPU). A backend may choose another order and names it (`kv_order`, in the words of
`execution.block_order`); readers convert blocks of another order if the model's exactness is "layout".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch

from tandem_engine.ops.sampling import RowSample, SamplingRow

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Activation = Literal["silu", "gelu_tanh"]
EncoderActivation = Literal["gelu", "gelu_tanh"]
"""gelu: x / 2 * (1 + erf(x / sqrt 2))."""


@dataclass(frozen=True)
class Run:
    """Tokens [start, start + num_tokens) of one request, from `row` on in the step's token dimension."""

    row: int
    start: int
    num_tokens: int
    blocks: torch.Tensor
    """[num_blocks], int64: the request's block table up to its last token here."""


class StepArrays(NamedTuple):
    """What a backend makes the step of one group of layers from; tensors are on the model's device."""

    token_ids: torch.Tensor
    sample_rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    blocks: torch.Tensor
    table: Integers


@dataclass(frozen=True)
class HostBatch:
    """The numbers of one step on the host: int64, contiguous, all in one buffer, so that one copy uploads them.

    buffer   | token_ids | sample_rows | runs | blocks of each group | positions | slots of each group |
    """

    buffer: Integers
    """[all numbers]; its owner writes the next step but one into the same memory."""
    token_ids: Integers
    """[num_tokens]."""
    positions: Integers
    """[num_tokens]."""
    sample_rows: Integers
    """[num_sampled]: indices into the token dimension, in the runs' order."""
    slots: Integers
    """[num_groups, num_tokens]: block * block_size + place in the block, for each group of layers."""
    blocks: Integers
    """[num_groups, num_blocks]: the runs' block tables one after the other, each up to the run's last token."""
    runs: Integers
    """[num_runs, 4]: row, start, num_tokens, first index in `blocks`; the same for all groups."""

    @classmethod
    def sized(
        cls,
        num_tokens: int,
        num_sampled: int,
        num_runs: int,
        num_blocks: int,
        num_groups: int = 1,
        allocate: Callable[[int], Integers] = lambda size: np.empty(size, np.int64),
    ) -> HostBatch:
        """Return a batch to be filled; `allocate` returns memory for at least so many numbers."""
        sizes = (num_tokens, num_sampled, 4 * num_runs, num_groups * num_blocks, num_tokens, num_groups * num_tokens)
        bounds = [0, *accumulate(sizes)]
        buffer = allocate(bounds[-1])[: bounds[-1]]
        token_ids, sample_rows, runs, blocks, positions, slots = (buffer[start:end] for start, end in pairwise(bounds))
        of_slots, of_blocks = slots.reshape(num_groups, num_tokens), blocks.reshape(num_groups, num_blocks)
        return cls(buffer, token_ids, positions, sample_rows, of_slots, of_blocks, runs.reshape(num_runs, 4))

    def on(self, device: torch.device) -> list[StepArrays]:
        """Upload the batch in one copy, or in none to a CPU; return the arrays of each group, which share memory."""
        everything = torch.from_numpy(self.buffer)
        if device.type != "cpu":
            everything = everything.to(device, non_blocking=True)
        (num_groups, num_tokens), num_blocks = self.slots.shape, self.blocks.shape[1]
        sizes = [num_tokens, len(self.sample_rows), self.runs.size]
        of_groups = [*[num_blocks] * num_groups, num_tokens, *[num_tokens] * num_groups]
        token_ids, sample_rows, _, *rest = torch.split_with_sizes(everything, sizes + of_groups)
        blocks_of, positions, slots_of = rest[:num_groups], rest[num_groups], rest[num_groups + 1 :]
        return [
            StepArrays(token_ids, sample_rows, positions, slots, blocks, self.runs)
            for slots, blocks in zip(slots_of, blocks_of, strict=True)
        ]


@dataclass(frozen=True)
class Step:
    """The places of one step's tokens; made by `Ops.step` for that step alone."""

    token_ids: torch.Tensor
    """[num_tokens], int64."""
    sample_rows: torch.Tensor
    """[num_sampled], int64: indices into the token dimension, in the runs' order."""
    positions: torch.Tensor
    """[num_tokens], int64."""
    slots: torch.Tensor
    """[num_tokens], int64: block * block_size + place in the block."""
    blocks: torch.Tensor
    """[num_blocks], int64: the runs' block tables one after the other."""
    table: Integers
    """[num_runs, 4], on the host: row, start, num_tokens, first index in `blocks`."""
    groups: Sequence[Step] = field(default=(), kw_only=True)
    """The same tokens in the blocks of each group of layers (`KVPool.places`); empty: there is one group."""

    @cached_property
    def runs(self) -> Sequence[Run]:
        """The runs, each with its part of `blocks`; ops that work run by run use them."""
        rows: list[list[int]] = self.table.tolist()
        ends = [first for *_, first in rows[1:]] + [len(self.blocks)]
        return (
            [
                Run(row, start, num_tokens, self.blocks[first:end])
                for (row, start, num_tokens, first), end in zip(rows, ends, strict=True)
            ]
            if rows
            else []
        )


@dataclass(frozen=True)
class KVPool:
    """The KV blocks of all layers."""

    rows: torch.Tensor
    """[num_blocks, elements_per_block], of the pool's dtype."""
    num_layers: int
    """Layers per block."""
    num_kv_heads: int
    head_dim: int
    block_size: int
    places: Sequence[tuple[int, int]] = ()
    """Per layer of the model, its group and its index in a block of that group; empty: one group, in order."""

    def place(self, step: Step, layer: int) -> tuple[Step, int]:
        """Return the step and the layer index that ops take for one of the model's layers."""
        if not self.places:
            return step, layer
        group, index = self.places[layer]
        return step.groups[group], index

    @property
    def elements_per_layer(self) -> int:
        """Numbers of keys and values in one layer of one block."""
        return 2 * self.num_kv_heads * self.head_dim * self.block_size


@dataclass(frozen=True)
class Rotary:
    """Tables of cosines and sines, [num_positions, rotary_dim / 2], float32, any attention factor multiplied in.

    Dimension i < rotary_dim / 2 rotates with dimension i + rotary_dim / 2 ("rotate half", the order of Hugging Face
    checkpoints). Dimensions from rotary_dim on do not rotate.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class QKNorm:
    """RMS norms of queries and keys before the rotary embedding."""

    query: torch.Tensor
    """[head_dim] or [num_heads * head_dim], float32, any offset already added."""
    key: torch.Tensor
    """[head_dim] or [num_kv_heads * head_dim], likewise."""
    eps: float


class Weight(Protocol):
    """A linear layer's weights in a backend's layout; a cache file keeps `tensors`."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def tensors(self) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class LayerParts:
    """The weights and parameters of a decoder layer, in the order of its ops."""

    input_norm: torch.Tensor | None
    """[hidden_size], float32, any offset already added; None: the layer lacks this norm. The same for other norms."""
    qkv: Weight
    projection_norm: QKNorm | None
    """Of all queries of a token as one vector, and of all its keys (OLMo 2)."""
    head_norm: QKNorm | None
    """Of each query head and each key head (Qwen 3, Gemma 3)."""
    rotary: Rotary | None
    num_heads: int
    scale: float
    window: int | None
    softcap: float | None
    output: Weight
    attention_output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    gate_up: Weight | None
    """None, like `down`: the layer has no plain MLP."""
    activation: Activation
    down: Weight | None
    mlp_output_norm: torch.Tensor | None
    eps: float
    """The epsilon of all norms but those of heads."""


@dataclass(frozen=True)
class LayerNorm:
    """The parameters of a layer norm: (x - mean) / sqrt(variance + eps) * weight + bias."""

    weight: torch.Tensor
    """[features], float32; so is `bias`."""
    bias: torch.Tensor
    eps: float


@dataclass(frozen=True)
class EncoderLayerParts:
    """The weights and parameters of an encoder layer whose norms follow its sums, in the order of its ops."""

    qkv: Weight
    num_heads: int
    scale: float
    output: Weight
    attention_norm: LayerNorm
    up: Weight
    activation: EncoderActivation
    down: Weight
    mlp_norm: LayerNorm


class EncoderLayers(Protocol):
    """All layers of an encoder in one op, with the bits of their ops one by one."""

    def forward(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return the last layer's result, [num_tokens, hidden_size].

        `x` [num_tokens, hidden_size], contiguous, may be overwritten; `starts` as in `Ops.self_attention`.
        """
        ...


class Layers(Protocol):
    """All layers of a model in one op, with the bits of their ops one by one."""

    def forward(
        self, x: torch.Tensor, step: Step, pool: KVPool, rows: torch.Tensor, kv_written: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream of `rows` after the last layer, and what is to be added to it.

        `x` [num_tokens, hidden_size], contiguous, is overwritten; `rows` [num_rows], int64. Both results are
        [num_rows, hidden_size]. `kv_written` is called once, between the last layer's KV write and its attention.
        """
        ...


class Ops(Protocol):
    """One backend. Not thread-safe: one thread of an engine uses it at a time."""

    @property
    def name(self) -> str:
        """The name of the arithmetic, for the numerics class: equal names mean equal bits."""
        ...

    @property
    def kv_order(self) -> str:
        """The order of a block's bytes, for the KV layout."""
        ...

    @property
    def library(self) -> ctypes.CDLL | None:
        """The C++ library of this backend's work on the host: sampling, grammar masks. None: Python does it."""
        ...

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Weight:
        """Lay out `weight` [out_features, in_features], float32 or bfloat16, and keep its dtype."""
        ...

    def unpack(self, weight: Weight) -> torch.Tensor:
        """Return the matrix that was packed, bit for bit."""
        ...

    def packed(self, in_features: int, out_features: int, tensors: dict[str, torch.Tensor]) -> Weight:
        """Return the weight of `tensors` from a cache file, without a copy."""
        ...

    def rows(self, weight: Weight, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the matrix that was packed: [num_indices, in_features], float32.

        A model whose head shares its embeddings reads them here, so that they are in memory once. `indices`
        [num_indices], int64.
        """
        ...

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Return x W^T + bias, [num_tokens, out_features], in float32 arithmetic for every dtype of the weights."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight; `weight` [features], float32, any offset already added."""
        ...

    def add_rms_norm(self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add `more` to `x` in place and return `rms_norm` of the sum, with the bits of the two ops."""
        ...

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(gate) * up, [num_tokens, features]; `gate_up` [num_tokens, 2 * features], gate first."""
        ...

    def step(self, batch: HostBatch) -> Step:
        """Upload a batch in one copy, and prepare the data that all layers of the step share."""
        ...

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
        """Norm and rotate queries and keys, store keys and values in their slots, and return the queries.

        `qkv` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] holds queries, keys and values, and is
        overwritten. The result, [num_tokens, num_heads * head_dim], may be a view of `qkv`. `rotary` None: no rotation.
        """
        ...

    def kv_write(self, key: torch.Tensor, value: torch.Tensor, step: Step, pool: KVPool, layer: int) -> None:
        """Store `key` and `value`, [num_tokens, num_kv_heads, head_dim], any strides, in their slots."""
        ...

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
        """Attend from `query` [num_tokens, num_heads * head_dim] to its request's keys up to its own position.

        `query` is float32, or of the pool's dtype if the op layer takes that; the result is one of the two.

        A window counts the token itself. With `softcap`, scores become softcap * tanh(score / softcap) first (Gemma 2).
        """
        ...

    def layers(self, layers: Sequence[LayerParts]) -> Layers | None:
        """Return one op for all layers of a model; None: this backend has none for these layers, use its other ops."""
        ...

    def layer_norm(self, x: torch.Tensor, norm: LayerNorm, more: torch.Tensor | None = None) -> torch.Tensor:
        """Return the layer norm of `x`; with `more`, add `more` to `x` in place before."""
        ...

    def activate(self, x: torch.Tensor, activation: EncoderActivation) -> torch.Tensor:
        """Return the activation of every number of `x` [num_tokens, features]."""
        ...

    def self_attention(self, qkv: torch.Tensor, num_heads: int, starts: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend from every token to all tokens of its run, later ones too; return [num_tokens, num_heads * head_dim].

        `qkv` [num_tokens, 3 * num_heads * head_dim], contiguous, holds queries, keys and values. `starts`
        [num_runs + 1], int64, on the CPU: run r has the tokens [starts[r], starts[r + 1]), at least one. A token's
        bits depend on its run alone.
        """
        ...

    def encoder_layers(self, layers: Sequence[EncoderLayerParts]) -> EncoderLayers | None:
        """Return one op for all layers of an encoder; None: this backend has none, use its other ops."""
        ...

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[RowSample]:
        """Sample tokens from each row of `logits` [len(rows), vocab_size].

        A row's tokens depend on its logits and its `SamplingRow` alone. Raises UnusableLogits.
        """
        ...
