"""Connects the attention of transformers models to a paged KV cache.

`paged_attention` is registered with transformers' AttentionInterface. The model gets an `AttentionStep` as a keyword
of its forward, and passes it to every layer. No mask function is registered under our name, so transformers builds no
mask (`masking_utils._preprocess_mask_arguments`). The op layer handles causality and windows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from tandem_engine.ops.base import KVPool, Step

ATTENTION_NAME = "tandem_paged"
STEP_KEYWORD = "tandem_step"


class UnsupportedAttention(ValueError):
    """A layer needs a kind of attention that is not implemented."""


class AttentionOps(Protocol):
    """The part of `tandem_engine.ops.base.Ops` that attention uses."""

    def kv_write(self, key: torch.Tensor, value: torch.Tensor, step: Step, pool: KVPool, layer: int) -> None: ...

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
    ) -> torch.Tensor: ...


class AttentionParams(NamedTuple):
    """The parameters of a layer's attention besides its tensors; the same in every step."""

    layer: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass
class AttentionStep:
    """The data that the layers need of one step; created for one step."""

    ops: AttentionOps
    pool: KVPool
    step: Step
    when_written: Callable[[int], None] = lambda layer: None
    """Called when the keys and values of all runs of a layer are in their blocks."""
    calls: list[AttentionParams] = field(default_factory=list)
    """Of each call, in order."""


def register() -> None:
    """Register the attention with transformers; may be called again."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the step's keys and values, then attend; the signature is transformers'.

    `query` is [1, num_heads, num_tokens, head_dim], `key` and `value` have num_kv_heads; the result is
    [1, num_tokens, num_heads, head_dim]. Raises UnsupportedAttention.
    """
    step = kwargs.get(STEP_KEYWORD)
    _refuse_unsupported(module, step, attention_mask, kwargs)
    assert isinstance(step, AttentionStep), "refused above"
    layer: Any = module.layer_idx
    _, num_heads, num_tokens, head_dim = query.shape
    scale = head_dim**-0.5 if scaling is None else scaling
    step.calls.append(AttentionParams(layer, scale, sliding_window, softcap))
    of_group, index = step.pool.place(step.step, layer)
    step.ops.kv_write(key[0].transpose(0, 1), value[0].transpose(0, 1), of_group, step.pool, index)
    step.when_written(layer)
    attended = step.ops.paged_attention(
        query[0].transpose(0, 1).reshape(num_tokens, -1),
        num_heads,
        of_group,
        step.pool,
        index,
        scale=scale,
        window=sliding_window,
        softcap=softcap,
    )
    return attended.to(query.dtype).view(1, num_tokens, num_heads, head_dim), None


def _refuse_unsupported(
    module: torch.nn.Module, step: object, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> None:
    name = type(module).__name__
    if not isinstance(step, AttentionStep):
        raise UnsupportedAttention(f"{name} does not pass keywords of forward on to its attention")
    if kwargs.get("s_aux") is not None:
        raise UnsupportedAttention(f"{name} has attention sinks (s_aux), which are not supported")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedAttention(f"{name} adds a position bias to its scores, which is not supported")
    if attention_mask is not None:
        raise UnsupportedAttention(f"{name} brings a mask of its own, which is not supported")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedAttention(f"{name} attends to later tokens too, which no KV cache allows")
