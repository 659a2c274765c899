"""Does a loaded model really use our attention, and what does one block of its KV hold?

Asked by running it: a forward over a few tokens, with a store that remembers shapes instead of a pool.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.execution.attention import STEP_KEYWORD, AttentionRun, AttentionStep, UnsupportedAttention
from engine.execution.kv_cache import KVGeometry

_NUM_TOKENS = 4


@torch.inference_mode()
def probe_geometry(model: Any, num_layers: int, block_size: int) -> KVGeometry:
    """Return what a block holds; raises UnsupportedAttention unless every layer attends through us exactly once."""
    store = _ProbeStore()
    step = _run(model, store, _NUM_TOKENS)
    if [layer for layer, _ in step.windows_seen] != list(range(num_layers)):
        raise UnsupportedAttention(
            f"{type(model).__name__} attended through Tandem in layers {[layer for layer, _ in step.windows_seen]}, "
            f"where each of {num_layers} should once; its layers are not all plain attention"
        )
    _check_windows(model, step)
    shapes = {(*key.shape[1:], value.shape[-1]) for key, value in store.written.values()}
    if len(shapes) > 1:
        raise UnsupportedAttention(f"{type(model).__name__} has layers whose KV differ in shape: {sorted(shapes)}")
    ((num_kv_heads, head_dim, value_dim),) = shapes
    if head_dim != value_dim:
        raise UnsupportedAttention(
            f"{type(model).__name__} has keys of {head_dim} and values of {value_dim} numbers per head; "
            "only equal sizes are built"
        )
    return KVGeometry(num_layers, num_kv_heads, head_dim, block_size, store.written[0][0].dtype)


@torch.inference_mode()
def run_largest_step(model: Any, num_tokens: int) -> None:
    """Run a forward as large as a step can be, so that the device's high-water mark of memory is known."""
    _run(model, _ProbeStore(), num_tokens)


def _run(model: Any, store: _ProbeStore, num_tokens: int) -> AttentionStep:
    token_ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=model.device)
    positions = torch.arange(num_tokens, device=model.device)
    run = AttentionRun(0, 0, num_tokens, positions)
    step = AttentionStep(store, positions, [run])
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
    for (layer, window), kind in zip(step.windows_seen, layer_types, strict=False):
        if (kind == "sliding_attention") != (window is not None):
            raise UnsupportedAttention(
                f"{type(model).__name__} calls layer {layer} {kind}, but attends with a window of {window}"
            )


class _ProbeStore:
    """Keeps the last keys and values of each layer and gives them back."""

    def __init__(self) -> None:
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep `key` and `value`, [num_tokens, num_kv_heads, head_dim]."""
        self.written[layer] = (key, value)

    def gather(self, layer: int, blocks: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self.written[layer]
        return key[start:end].transpose(0, 1), value[start:end].transpose(0, 1)
