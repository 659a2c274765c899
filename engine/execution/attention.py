"""How does a transformers model attend to a paged KV cache?

`paged_attention` is registered with transformers' AttentionInterface. The runner passes an `AttentionStep` as a keyword
of the model's forward, which hands it down to every layer. No mask function is registered under our name: transformers
then builds no mask (`masking_utils._preprocess_mask_arguments`), and causality and windows are ours.

Each run attends by itself, so that its result cannot depend on its neighbours' lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface

ATTENTION_NAME = "tandem_paged"
STEP_KEYWORD = "tandem_step"


class UnsupportedAttention(ValueError):
    """A layer asks for a kind of attention that is not built."""


class KVStore(Protocol):
    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None: ...

    def gather(self, layer: int, blocks: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class AttentionRun:
    """Tokens [start, end) of one request, at `row` and after in the step's token dimension."""

    row: int
    start: int
    end: int
    blocks: torch.Tensor
    """[num_blocks], int64: the request's block table up to `end`."""

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def first_key(self, window: int | None) -> int:
        """Return the first position that any token of the run sees; a window counts the token itself."""
        return 0 if window is None else max(0, self.start - window + 1)


@dataclass
class AttentionStep:
    """What the layers need to know of one step; made for it and thrown away."""

    store: KVStore
    slots: torch.Tensor
    runs: Sequence[AttentionRun]
    when_written: Callable[[int], None] = lambda layer: None
    """Called when a layer's keys and values of all runs are in their blocks."""
    windows_seen: list[tuple[int, int | None]] = field(default_factory=list)
    """(layer, window) of each call, in order."""
    _masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, run: AttentionRun, window: int | None) -> torch.Tensor | None:
        """Return which keys [first_key, end) each token sees, bool [num_tokens, num_keys]; None: plain causal.

        One token sees all of them. The layers of a step share the tensor.
        """
        key = (run.row, window)
        if key not in self._masks:
            self._masks[key] = _mask(run, window, self.slots.device)
        return self._masks[key]


def register() -> None:
    """Make the attention known to transformers; may be called again."""
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
    _refuse_what_is_not_built(module, step, attention_mask, kwargs)
    assert isinstance(step, AttentionStep), "refused above"
    layer: Any = module.layer_idx
    step.windows_seen.append((layer, sliding_window))
    step.store.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), step.slots)
    step.when_written(layer)
    output = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)  # [tokens, heads, dim]
    for run in step.runs:
        rows = slice(run.row, run.row + run.num_tokens)
        keys, values = step.store.gather(layer, run.blocks, run.first_key(sliding_window), run.end)
        attended = _attend(query[0, :, rows], keys, values, run, step, sliding_window, scaling, softcap)
        output[rows] = attended.transpose(0, 1)  # [heads, tokens, dim] -> [tokens, heads, dim]
    return output.unsqueeze(0), None


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    run: AttentionRun,
    step: AttentionStep,
    window: int | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend from `query` [num_heads, num_tokens, head_dim] to `keys` [num_kv_heads, num_keys, head_dim]."""
    if run.num_tokens == 1:  # heads of a group become rows of one query: the keys are read once, and there is no mask
        packed = query.reshape(keys.shape[0], -1, query.shape[-1])
        return _dense(packed, keys, values, None, False, scaling, softcap).reshape(query.shape)
    mask = step.mask(run, window)
    return _dense(query, keys, values, mask, mask is None, scaling, softcap)


def _dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    if softcap is not None:
        return _softcapped(query, keys, values, mask, is_causal, scaling, softcap)
    has_groups = query.shape[0] != keys.shape[0]
    if has_groups and mask is not None and query.device.type == "cuda":  # enable_gqa with a mask takes the slow kernel
        keys, values = _repeat_heads(query, keys), _repeat_heads(query, values)
        has_groups = False
    return functional.scaled_dot_product_attention(
        query.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=has_groups,
    )[0]


def _softcapped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Squash scores with tanh before the softmax (Gemma 2, section 2); SDPA has no such option."""
    keys, values = _repeat_heads(query, keys), _repeat_heads(query, values)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.tanh(query @ keys.transpose(1, 2) * scale / softcap) * softcap  # [heads, tokens, keys]
    if is_causal:
        mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ values


def _repeat_heads(query: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    return heads.repeat_interleave(query.shape[0] // heads.shape[0], dim=0)


def _mask(run: AttentionRun, window: int | None, device: torch.device) -> torch.Tensor | None:
    if run.start == 0 and (window is None or run.end <= window):
        return None
    positions = torch.arange(run.start, run.end, device=device).unsqueeze(1)
    keys = torch.arange(run.first_key(window), run.end, device=device).unsqueeze(0)
    visible = keys <= positions
    return visible if window is None else visible & (keys > positions - window)


def _refuse_what_is_not_built(
    module: torch.nn.Module, step: object, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> None:
    name = type(module).__name__
    if not isinstance(step, AttentionStep):
        raise UnsupportedAttention(f"{name} does not pass keywords of forward on to its attention")
    if kwargs.get("s_aux") is not None:
        raise UnsupportedAttention(f"{name} has attention sinks (s_aux), which are not built")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedAttention(f"{name} adds a position bias to its scores, which is not built")
    if attention_mask is not None:
        raise UnsupportedAttention(f"{name} brings a mask of its own, which is not built")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedAttention(f"{name} attends to later tokens too, which no KV cache allows")
