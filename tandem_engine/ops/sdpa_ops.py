"""Attends to the paged KV cache on a GPU through torch's SDPA.

Results depend on a run's shape and on what shares its call: another chunking of a prompt, or other requests beside it,
may give other bits. The name of this op layer is part of the numerics class, which says so.

A block is token-major, the order of GPU libraries: gathered blocks are the keys of SDPA without a further copy.

    KV block    of each layer: keys [block_size, num_kv_heads, head_dim], then values likewise
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional

from tandem_engine.ops import plain_sampling
from tandem_engine.ops.base import HostBatch, KVPool, Step
from tandem_engine.ops.cpu.library import arithmetic_name
from tandem_engine.ops.cpu.sampling import Sampler
from tandem_engine.ops.device_sampling import DeviceSampler
from tandem_engine.ops.sampling import RowSample, SamplingRow
from tandem_engine.ops.sdpa_plan import Chunk, Decodes, SdpaStep
from tandem_engine.ops.torch_ops import TorchOps


class SdpaOps(TorchOps):
    """Torch ops whose attention is SDPA in the KV pool's dtype.

    `library` samples and computes grammar masks on the host; None: numpy and Python do.
    """

    def __init__(self, device: torch.device | None = None, library: ctypes.CDLL | None = None) -> None:
        super().__init__(device)
        self._library = library
        host_sample = plain_sampling.sample if library is None else Sampler(library).sample
        self._sampler = DeviceSampler(self.device, host_sample)

    @property
    def name(self) -> str:
        sampler = "" if self._library is None else f"/{arithmetic_name(self._library)}"
        return f"{super().name}/sdpa{sampler}"

    @property
    def library(self) -> ctypes.CDLL | None:
        return self._library

    @property
    def kv_order(self) -> str:
        return "layer,kv,token,head,dim"

    def step(self, batch: HostBatch) -> Step:
        steps = [SdpaStep(*of_group) for of_group in batch.on(self.device)]
        return replace(steps[0], groups=steps) if len(steps) > 1 else steps[0]

    def kv_write(self, key: torch.Tensor, value: torch.Tensor, step: Step, pool: KVPool, layer: int) -> None:
        assert isinstance(step, SdpaStep), "a step is made by the ops that run it"
        if not step.places and (begun := step.begun_blocks(pool.block_size)) is not None:
            # Padding reads a block's end, and a NaN that an earlier owner left there would be 0 * NaN = NaN.
            pool.rows.index_fill_(0, begun, 0)
        blocks, places = step.place(pool.block_size)
        both = torch.stack((key, value), 1).to(pool.rows.dtype)  # [num_tokens, 2, num_kv_heads, head_dim]
        _of_layer(pool, layer)[blocks, :, places] = both

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
        assert isinstance(step, SdpaStep), "a step is made by the ops that run it"
        plan = step.plan(window, pool)
        # [num_tokens, num_kv_heads, query heads of each, head_dim]
        heads = query.to(pool.rows.dtype).view(len(query), pool.num_kv_heads, -1, pool.head_dim)
        output = torch.empty_like(heads)
        for decodes in plan.decodes:
            output[decodes.rows] = _attend_decodes(heads[decodes.rows], decodes, pool, layer, scale, softcap)
        for chunk in plan.chunks:
            output[chunk.rows] = _attend_chunk(heads[chunk.rows], chunk, pool, layer, scale, softcap)
        return output.flatten(1).to(query.dtype)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[RowSample]:
        return self._sampler.sample(logits, rows)


def _of_layer(pool: KVPool, layer: int) -> torch.Tensor:
    """Return [num_blocks, 2, block_size, num_kv_heads, head_dim], a view."""
    shape = (len(pool.rows), pool.num_layers, 2, pool.block_size, pool.num_kv_heads, pool.head_dim)
    return pool.rows.view(shape)[:, layer]


def _attend_decodes(
    query: torch.Tensor, decodes: Decodes, pool: KVPool, layer: int, scale: float, softcap: float | None
) -> torch.Tensor:
    """Attend from `query` [num_runs, num_kv_heads, group, head_dim]: heads of a group are rows that share keys."""
    keys, values = (
        each.view(decodes.num_runs, -1, pool.num_kv_heads, pool.head_dim)[:, decodes.keys].transpose(1, 2)
        for each in _gathered(pool, layer, decodes.blocks)
    )  # each [num_runs, num_kv_heads, num_keys, head_dim]
    if softcap is not None:
        return _softcapped(query, keys, values, decodes.bias, scale, softcap)
    return functional.scaled_dot_product_attention(query, keys, values, attn_mask=decodes.bias, scale=scale)


def _attend_chunk(
    query: torch.Tensor, chunk: Chunk, pool: KVPool, layer: int, scale: float, softcap: float | None
) -> torch.Tensor:
    """Attend from `query` [num_tokens, num_kv_heads, group, head_dim]: a group's heads see the same keys, uncopied."""
    by_head = query.permute(1, 2, 0, 3)  # [num_kv_heads, group, num_tokens, head_dim]
    keys, values = (
        each.flatten(0, 1)[chunk.keys].transpose(0, 1).unsqueeze(1).expand(-1, by_head.shape[1], -1, -1)
        for each in _gathered(pool, layer, chunk.blocks)
    )
    if softcap is not None:
        attended = _softcapped(by_head, keys, values, chunk.bias, scale, softcap)
    elif chunk.window is None and (chunk.is_square or _has_lower_right(by_head, keys, values)):
        attended = _causal(by_head, keys, values, scale, is_square=chunk.is_square)
    else:
        attended = functional.scaled_dot_product_attention(by_head, keys, values, attn_mask=chunk.bias, scale=scale)
    return attended.permute(2, 0, 1, 3)


def _has_lower_right(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether FlashAttention can take these; its causal mask is aligned at the last key (its changes in 2.1)."""
    if query.device.type != "cuda" or query.shape[-1] % 8:
        return False
    # SDPA itself is not causal where keys outnumber queries, so its own check would refuse `is_causal`.
    parameters = SDPAParams(query, keys, values, None, 0.0, False, False)
    return can_use_flash_attention(parameters)


def _causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, is_square: bool
) -> torch.Tensor:
    """Attend without a mask in memory, each token to the keys up to its own; see `torch.nn.attention.bias`."""
    if is_square:
        return functional.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
    attended: torch.Tensor = flash(query, keys, values, is_causal=True, scale=scale)[0]
    return attended


def _gathered(pool: KVPool, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of these blocks, [num_blocks, block_size, num_kv_heads, head_dim] each, contiguous."""
    keys, values = _of_layer(pool, layer).unbind(1)
    return keys.index_select(0, blocks), values.index_select(0, blocks)


def _softcapped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Squash scores with tanh before the softmax (Gemma 2, section 2); SDPA has no such option."""
    scores = torch.tanh(query @ keys.transpose(-1, -2) * (scale / softcap)) * softcap
    if bias is not None:
        scores = scores + bias
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ values
