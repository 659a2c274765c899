"""Builds the engine that serves a device, from a model that is there already."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tandem_engine.core import EngineCore
from tandem_engine.execution.kv_cache import PagedKVCache
from tandem_engine.execution.kv_groups import choose_groups
from tandem_engine.execution.model_runner import ModelRunner
from tandem_engine.execution.probe import probe_geometry
from tandem_engine.models.transformers_model import TransformersModel
from tandem_engine.ops.base import Ops
from tandem_engine.scheduling.scheduler_config import SchedulerConfig

_BLOCK_SIZE, _NUM_BLOCKS = 16, 64


def core_on(device: torch.device, model: Any, ops: Ops, *, max_num_batched_tokens: int) -> EngineCore:
    """Return an engine core for a model of transformers with our attention."""
    geometry, calls = probe_geometry(model, model.config.num_hidden_layers, _BLOCK_SIZE, device)
    groups = choose_groups([call.window for call in calls])
    cache = PagedKVCache(replace(geometry, order=ops.kv_order, groups=groups), _NUM_BLOCKS, device)
    limits = SchedulerConfig(
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        context_length=256,
        vocab_size=model.config.vocab_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=8,
        num_window_groups=len(groups) - 1 if groups else None,
        group_window=groups[-1].window if groups else None,
    )
    return EngineCore(limits, ModelRunner(TransformersModel(model, geometry.num_layers, ops), ops, cache))
