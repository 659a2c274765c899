"""Describes the model that vLLM has loaded, as our own engine describes its models."""

from __future__ import annotations

from typing import Any

import torch
import vllm
from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore

from tandem_engine.layout import GroupInfo, LayoutInfo
from tandem_engine.messages import ModelInfo
from tandem_engine.models.card import Numerics, describe
from tandem_engine.models.checkpoint import Checkpoint
from tandem_engine.models.digest import DigestCache
from tandem_engine.scheduling.numerics import BATCH_DEPENDENT


def describe_model(
    checkpoint: Checkpoint, config: VllmConfig, context_length: int, numerics_tag: str, digests: DigestCache
) -> ModelInfo:
    """Return the facts of the checkpoint as vLLM serves it."""
    model = config.model_config
    device = torch.device(config.device_config.device_type)
    architecture = str(model.architecture)
    numerics = Numerics(_numerics_class(config, device, numerics_tag), architecture, model.dtype, device)
    info = describe(checkpoint, model.hf_text_config, context_length, numerics, digests)
    return replace(info, quantization=str(model.quantization or ""), kv_dtype=_kv_dtype(config))


def layout(core: EngineCore) -> LayoutInfo:
    """Return the layout of vLLM's pool.

    The order is vLLM's own, LBHNC on a CPU: one tensor per layer, [block, head, token, key and value]. So a block of
    ours is as many pieces as there are layers.
    """
    groups: list[Any] = core.scheduler.kv_cache_config.kv_cache_groups
    cache = core.scheduler.kv_cache_config
    numbers = {name: index for index, name in enumerate(name for group in groups for name in group.layer_names)}
    spec = groups[0].kv_cache_spec
    head_size = getattr(spec, "head_size", 0)
    return LayoutInfo(
        num_layers=len(numbers),
        tokens_per_block=spec.block_size,
        num_kv_heads=getattr(spec, "num_kv_heads", 1),
        k_head_size=head_size,
        v_head_size=getattr(spec, "head_size_v", head_size),
        dtype=str(getattr(spec, "dtype", "")).removeprefix("torch."),
        order=f"vllm-{cache.kv_cache_layout}",
        bytes_per_block=spec.page_size_bytes * len(groups[0].layer_names),
        groups=[]
        if len(groups) == 1
        else [
            GroupInfo(
                [numbers[name] for name in group.layer_names], getattr(group.kv_cache_spec, "sliding_window", None)
            )
            for group in groups
        ],
    )


def _numerics_class(config: VllmConfig, device: torch.device, tag: str) -> str:
    """Return the name of everything that decides how numbers round.

    It promises that the draw is a function of logits, seed, position and answer, and that a migrated answer is drawn
    from the same distribution. It does not promise equal logits: rounding depends on the other requests of a step.
    """
    model = config.model_config
    where = device.type
    if device.type == "cpu":
        where = f"cpu-{torch.backends.cpu.get_cpu_capability().lower().replace(' ', '-')}"
    elif device.type == "cuda":
        where = f"cuda-{torch.cuda.get_device_name(device).lower().replace(' ', '-')}"
    dtype = str(model.dtype).removeprefix("torch.")
    name = f"vllm-{vllm.__version__.split('+')[0]}/{where}/{dtype}/{model.hf_text_config.model_type}/{_ranks(config)}"
    return "/".join([name, f"fast-{BATCH_DEPENDENT}", *([tag] if tag else [])])


def _ranks(config: VllmConfig) -> str:
    """Return how the model is cut: sums over ranks round in another order."""
    parallel = config.parallel_config
    stages = f"-pp{parallel.pipeline_parallel_size}" if parallel.pipeline_parallel_size > 1 else ""
    return f"tp{parallel.tensor_parallel_size}{stages}"


def _kv_dtype(config: VllmConfig) -> str:
    cache_dtype = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if cache_dtype == "auto" else cache_dtype
