"""How does a checkpoint become a model by way of transformers' own code? The compatibility route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from tandem_engine.execution.attention import ATTENTION_NAME, Asked, UnsupportedAttention, register
from tandem_engine.execution.kv_cache import KVGeometry
from tandem_engine.execution.probe import probe_geometry, run_largest_step
from tandem_engine.models.checkpoint import Checkpoint, ModelUnusable, Progress
from tandem_engine.models.stored import stored_dtypes
from tandem_engine.models.support import check_model_class
from tandem_engine.models.transformers_blocks import use_own_blocks
from tandem_engine.models.transformers_experts import use_own_experts
from tandem_engine.models.transformers_model import TransformersModel, use_own_activations, use_own_linears
from tandem_engine.ops.base import Ops
from tandem_engine.settings import EngineConfig


@dataclass(frozen=True)
class Compatible:
    """A model of transformers with our attention and, on a CPU, our linear layers."""

    model: TransformersModel
    architecture: str
    geometry: KVGeometry
    windows: Sequence[int | None]
    """Of each layer."""
    is_rowwise: bool
    """Whether a row's bits depend on that row alone."""
    composition: str
    """How many of its blocks are ours, for the numerics class; "" where none can be."""


def load_compatible(
    checkpoint: Checkpoint,
    model_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    config: EngineConfig,
    report: Progress,
) -> Compatible:
    """Read the weights and try the model out; raises ModelUnusable if it is not built for what the model does."""
    on_cpu = device.type == "cpu"
    has_own_linears = on_cpu and dtype == torch.float32
    stays_bf16 = on_cpu and config.dtype == "auto" and stored_dtypes(checkpoint.weight_files) == {"BF16"}
    model = _read_weights(checkpoint, model_config, torch.bfloat16 if stays_bf16 else dtype).to(device)
    has_rowwise_activations = False
    if has_own_linears:
        use_own_experts(model, ops)
        use_own_linears(model, ops)
        has_rowwise_activations = use_own_activations(model)
    report("trying the model out", 0.6)
    geometry, asked = _try_out(model, config, device)
    composition = use_own_blocks(model, asked, ops) if has_own_linears else ""
    has_stacked_experts = any(parameter.ndim > 2 for parameter in model.parameters())  # transformers multiplies them
    is_rowwise = ops.is_rowwise and has_rowwise_activations and not has_stacked_experts
    wrapped = TransformersModel(model, geometry.num_layers, ops)
    windows = [each.window for each in asked]
    return Compatible(wrapped, type(model).__name__, geometry, windows, is_rowwise, composition)


def _read_weights(checkpoint: Checkpoint, model_config: Any, dtype: torch.dtype) -> Any:
    register()
    transformers_logging: Any = transformers.utils.logging
    transformers_logging.disable_progress_bar()  # ours are the LoadProgress events
    model_class = _model_class(model_config)
    check_model_class(model_class, model_config)
    model = model_class.from_pretrained(
        checkpoint.folder,
        config=model_config,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        use_safetensors=True,
        local_files_only=True,
    )
    return model.eval().requires_grad_(False)


def _model_class(model_config: Any) -> Any:
    mapping: Any = AutoModelForCausalLM._model_mapping
    found = mapping.get(type(model_config), None)
    if found is None:
        raise ModelUnusable(f"{model_config.model_type} is no causal language model of transformers; serve one that is")
    return found[0] if isinstance(found, tuple) else found


def _try_out(model: Any, config: EngineConfig, device: torch.device) -> tuple[KVGeometry, list[Asked]]:
    try:
        geometry, asked = probe_geometry(model, model.config.num_hidden_layers, config.block_size, device)
    except UnsupportedAttention as error:
        raise ModelUnusable(f"{error}; serve a decoder-only model with plain or sliding-window attention") from error
    if device.type == "cuda":
        run_largest_step(model, config.max_num_batched_tokens, device)
    return geometry, asked
