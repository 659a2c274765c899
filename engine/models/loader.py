"""How does a checkpoint become a model that is ready to run?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from engine.execution.attention import ATTENTION_NAME, UnsupportedAttention, register
from engine.execution.kv_cache import KVGeometry
from engine.execution.probe import probe_geometry, run_largest_step
from engine.messages import ModelInfo
from engine.models.card import describe
from engine.models.checkpoint import Checkpoint, ModelUnusable, Progress, find_checkpoint
from engine.models.digest import DigestCache
from engine.models.placement import choose_device, choose_dtype, numerics_class
from engine.models.support import check_config, check_model_class, context_length
from engine.settings import EngineConfig


@dataclass(frozen=True)
class LoadedModel:
    model: Any
    """A transformers causal language model in eval mode, with our attention."""
    info: ModelInfo
    geometry: KVGeometry
    device: torch.device


def load_model(config: EngineConfig, report: Progress) -> LoadedModel:
    """Find, check, load and try out the model; raises ModelUnusable, saying what to do instead."""
    checkpoint = find_checkpoint(config.model, config.served_model_name, report)
    model_config = _read_config(checkpoint)
    check_config(model_config)
    length = context_length(model_config, config.max_model_len)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, model_config, device)
    report(f"reading {checkpoint.num_weight_bytes / 1e6:,.0f} MB of weights", 0.1)
    model = _read_weights(checkpoint, model_config, dtype).to(device)
    report("trying the model out", 0.6)
    geometry = _try_out(model, config)
    report("computing the weights' digest", 0.7)
    digests = DigestCache(Path(config.state_dir).expanduser() if config.state_dir else None)
    numerics = numerics_class(device, dtype, model_config.model_type)
    return LoadedModel(model, describe(checkpoint, model, length, numerics, digests), geometry, device)


def _read_config(checkpoint: Checkpoint) -> Any:
    try:
        return AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise ModelUnusable(
            f"transformers {transformers.__version__} cannot read {checkpoint.folder / 'config.json'}: {error}; "
            "code that comes with a checkpoint is never run"
        ) from error


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


def _try_out(model: Any, config: EngineConfig) -> KVGeometry:
    try:
        geometry = probe_geometry(model, model.config.num_hidden_layers, config.block_size)
    except UnsupportedAttention as error:
        raise ModelUnusable(f"{error}; serve a decoder-only model with plain or sliding-window attention") from error
    if model.device.type == "cuda":
        run_largest_step(model, config.max_num_batched_tokens)
    return geometry
