"""Computes attention of runs to all of themselves in plain torch.

Torch rounds a matrix product by its shape and by where its operands lie. So each run is computed by itself, from fresh
copies: its bits depend on its own tokens alone.
"""

from __future__ import annotations

from itertools import pairwise

import torch


def attend_to_all(qkv: torch.Tensor, num_heads: int, starts: torch.Tensor, scale: float) -> torch.Tensor:
    """Return what `Ops.self_attention` returns: [num_tokens, num_heads * head_dim], float32."""
    num_tokens, width = len(qkv), qkv.shape[1] // 3
    parts = qkv.view(num_tokens, 3, num_heads, width // num_heads)
    output = torch.empty(num_tokens, width, dtype=torch.float32, device=qkv.device)
    for start, end in pairwise(starts.tolist()):
        output[start:end] = _attend(parts[start:end], scale)
    return output


def _attend(parts: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the attention of one run; `parts` [run, 3, heads, dim]."""
    query, key, value = parts.permute(1, 2, 0, 3).clone(memory_format=torch.contiguous_format)  # each [heads, run, dim]
    scores = torch.bmm(query, key.transpose(1, 2)).mul_(scale)
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    weights.div_(weights.sum(-1, keepdim=True))
    return torch.bmm(weights, value).transpose(0, 1).flatten(1)  # [heads, run, dim] -> [run, heads * dim]
