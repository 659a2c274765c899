"""Checks that a loaded transformers model uses our attention, and finds the shape of its KV.

The check runs a forward over a few tokens, with ops that record shapes instead of using a pool.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tandem_engine.execution.attention import STEP_KEYWORD, AttentionParams, AttentionStep, UnsupportedAttention
from tandem_engine.execution.kv_cache import KVGeometry
from tandem_engine.ops.base import KVPool, Step

_NUM_TOKENS = 4


@torch.inference_mode()
def probe_geometry(
    model: Any, num_layers: int, block_size: int, device: torch.device
) -> tuple[KVGeometry, list[AttentionParams]]:
    """Return the geometry of a block, and the attention parameters of each layer.

    The model is on `device`; its weights need not be there. Raises UnsupportedAttention unless every layer uses our
    attention exactly once.
    """
    ops = _ProbeOps()
    step = _run(model, ops, _NUM_TOKENS, device)
    layers = [call.layer for call in step.calls]
    if layers != list(range(num_layers)):
        raise UnsupportedAttention(
            f"{type(model).__name__} attended through Tandem in layers {layers}, "
            f"where each of {num_layers} should once; its layers are not all plain attention"
        )
    _check_windows(model, step)
    shapes = {(*key.shape[1:], value.shape[-1]) for key, value in ops.written.values()}
    if len(shapes) > 1:
        raise UnsupportedAttention(f"{type(model).__name__} has layers whose KV differ in shape: {sorted(shapes)}")
    ((num_kv_heads, head_dim, value_dim),) = shapes
    if head_dim != value_dim:
        raise UnsupportedAttention(
            f"{type(model).__name__} has keys of {head_dim} and values of {value_dim} numbers per head; "
            "only equal sizes are supported"
        )
    geometry = KVGeometry(num_layers, num_kv_heads, head_dim, block_size, ops.written[0][0].dtype)
    return geometry, step.calls


@torch.inference_mode()
def run_largest_step(model: Any, num_tokens: int, device: torch.device) -> None:
    """Run a forward of the largest step, so that the device's peak of memory is known."""
    _run(model, _ProbeOps(), num_tokens, device)


def _run(model: Any, ops: _ProbeOps, num_tokens: int, device: torch.device) -> AttentionStep:
    token_ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device)
    no_pool = KVPool(torch.empty(0, 0), 0, 0, 0, 1)
    no_blocks = np.empty((0, 4), np.int64)
    places = Step(token_ids[0], positions[-1:], positions, positions, positions[:0], no_blocks)
    step = AttentionStep(ops, no_pool, places)
    model(
        input_ids=token_ids,
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=positions[-1:],
        **{STEP_KEYWORD: step},
    )
    return step


def _check_windows(model: Any, step: AttentionStep) -> None:
    layer_types = getattr(model.config, "layer_types", None) or []
    if not layer_types and (window := _window_in_masks(model)) and any(call.window != window for call in step.calls):
        raise UnsupportedAttention(
            f"{type(model).__name__} tells masks, but not attention, of its window of {window} tokens"
        )
    for call, kind in zip(step.calls, layer_types, strict=False):
        if (kind == "sliding_attention") != (call.window is not None):
            raise UnsupportedAttention(
                f"{type(model).__name__} calls layer {call.layer} {kind}, but attends with a window of {call.window}"
            )


def _window_in_masks(model: Any) -> int | None:
    """Return the window of a model whose masks have windows, if the window is shorter than the context."""
    window: int | None = getattr(model.config, "sliding_window", None)
    has_masks = hasattr(sys.modules[type(model).__module__], "create_sliding_window_causal_mask")
    return window if window and has_masks and window < model.config.max_position_embeddings else None


class _ProbeOps:
    """Keeps the last keys and values of each layer, and attends to them as one run from its first token."""

    def __init__(self) -> None:
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def kv_write(self, key: torch.Tensor, value: torch.Tensor, step: Step, pool: KVPool, layer: int) -> None:
        self.written[layer] = (key, value)

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
        key, value = (each.transpose(0, 1).unsqueeze(0) for each in self.written[layer])
        if key.shape[-1] != value.shape[-1]:
            return query  # refused once the shapes are compared
        heads = query.to(key.dtype).view(len(query), num_heads, -1).transpose(0, 1).unsqueeze(0)
        attended = functional.scaled_dot_product_attention(heads, key, value, is_causal=True, enable_gqa=True)
        return attended[0].transpose(0, 1).flatten(1)
