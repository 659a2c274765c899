"""Attends to the paged KV cache on a GPU through torch's SDPA, run by run.

Results depend on a run's shape: equal runs give equal bits, but another chunking of a prompt may give other bits. The
name of this op layer is part of the numerics class.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch.nn import functional

from tandem_engine.ops import plain_sampling
from tandem_engine.ops.base import KVPool, Run, Step
from tandem_engine.ops.cpu.library import arithmetic_name
from tandem_engine.ops.cpu.sampling import Sampler
from tandem_engine.ops.device_sampling import DeviceSampler
from tandem_engine.ops.sampling import RowSample, SamplingRow
from tandem_engine.ops.torch_ops import TorchOps

MAX_GATHERED_TOKENS = 32_768
"""Keys that one call of SDPA attends to, unless one run has more."""


class SdpaOps(TorchOps):
    """Torch ops whose attention is one call of SDPA for each run, in the KV pool's dtype.

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

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[RowSample]:
        return self._sampler.sample(logits, rows)

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
        heads = query.to(pool.rows.dtype).view(len(query), num_heads, pool.head_dim)
        output = torch.empty_like(heads)
        for run in step.runs:
            rows = slice(run.row, run.row + run.num_tokens)
            first_key = _first_key(run, window)
            keys, values = _gather(pool, layer, run, first_key)
            mask = _mask(run, first_key, window, query.device)
            attended = _attend(heads[rows].transpose(0, 1), keys, values, mask, run, scale, softcap)
            output[rows] = attended.transpose(0, 1)  # [heads, tokens, dim] -> [tokens, heads, dim]
        return output.flatten(1).float()


def _first_key(run: Run, window: int | None) -> int:
    """Return the first position that any token of the run sees; a window counts the token itself."""
    return 0 if window is None else max(0, run.start - window + 1)


def _gather(pool: KVPool, layer: int, run: Run, first_key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, [num_kv_heads, num_keys, head_dim], from `first_key` to the run's end."""
    end = run.start + run.num_tokens
    first_block = first_key // pool.block_size
    blocks = run.blocks[first_block : -(-end // pool.block_size)]
    of_layer = pool.rows.view(len(pool.rows), pool.num_layers, 2, -1)[:, layer].index_select(0, blocks)
    keys = of_layer[:, 0].view(-1, pool.num_kv_heads, pool.head_dim, pool.block_size)
    values = of_layer[:, 1].view(-1, pool.num_kv_heads, pool.block_size, pool.head_dim)
    needed = slice(first_key - first_block * pool.block_size, end - first_block * pool.block_size)
    by_token = keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)
    return by_token[0][:, needed], by_token[1][:, needed]


def _mask(run: Run, first_key: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return which keys each token sees, bool [num_tokens, num_keys]; None: all, or all up to itself."""
    end = run.start + run.num_tokens
    if run.num_tokens == 1 or (run.start == 0 and (window is None or end <= window)):
        return None
    positions = torch.arange(run.start, end, device=device).unsqueeze(1)
    keys = torch.arange(first_key, end, device=device).unsqueeze(0)
    visible = keys <= positions
    return visible if window is None else visible & (keys > positions - window)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    run: Run,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attend from `query` [num_heads, num_tokens, head_dim] to `keys` [num_kv_heads, num_keys, head_dim]."""
    if softcap is not None:
        return _softcapped(query, keys, values, mask, run, scale, softcap)
    if run.num_tokens == 1:  # heads of a group become rows of one query: the keys are read once
        packed = query.reshape(keys.shape[0], -1, query.shape[-1])
        return functional.scaled_dot_product_attention(
            packed.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), scale=scale
        ).reshape(query.shape)  # some of SDPA's kernels lay their result out otherwise
    if mask is not None:  # enable_gqa with a mask takes the slow kernel
        keys, values = _repeat_heads(query, keys), _repeat_heads(query, values)
    return functional.scaled_dot_product_attention(
        query.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[0] != keys.shape[0],
    )[0]


def _softcapped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    run: Run,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Squash scores with tanh before the softmax (Gemma 2, section 2); SDPA has no such option."""
    keys, values = _repeat_heads(query, keys), _repeat_heads(query, values)
    scores = torch.tanh(query @ keys.transpose(1, 2) * scale / softcap) * softcap  # [heads, tokens, keys]
    if mask is None and run.num_tokens > 1:
        mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ values


def _repeat_heads(query: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    return heads.repeat_interleave(query.shape[0] // heads.shape[0], dim=0)
