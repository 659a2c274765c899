"""Builds a vLLM engine of a worker's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from tandem_engine.cores import num_threads
from tandem_engine.errors import ModelUnusable
from tandem_engine.messages import LayoutInfo, ModelInfo, Ready
from tandem_engine.models.checkpoint import Progress, find_checkpoint
from tandem_engine.models.digest import DigestCache
from tandem_engine.process import Core
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.settings import EngineConfig
from tandem_vllm.arguments import engine_args
from tandem_vllm.core import VllmCore
from tandem_vllm.drawing import EXTRA_ARGS_KEY
from tandem_vllm.engine import VllmEngine
from tandem_vllm.exchange import can_hand_over, make_exchange, with_region
from tandem_vllm.model import describe_model, layout, window_of_all


def assemble(config: EngineConfig, report: Progress, numa_node: int | None) -> tuple[Core, object, list[int]]:
    """Load the model with vLLM; raises ModelUnusable, whose message names the remedy."""
    if config.kv_region == "device":
        raise ModelUnusable("--kv-region device is for Tandem's own engine; leave it out, vLLM's blocks are staged")
    torch.set_num_threads(num_threads(config))
    checkpoint = find_checkpoint(config.model, config.served_model_name, report, config.revision)
    is_cpu = _is_cpu(config)
    facts: dict[str, Any] = {"tokenizer_path": checkpoint.assets.get("tokenizer.json", "")}
    try:
        vllm_config = engine_args(
            config, str(checkpoint.folder), is_cpu, {EXTRA_ARGS_KEY: facts}
        ).create_engine_config()
    except ValueError as error:
        raise ModelUnusable(f"vLLM refuses this model or its settings: {error}") from error
    context_length = vllm_config.model_config.max_model_len - 1
    digests = DigestCache(
        Path(config.state_dir).expanduser() if config.state_dir else None, lambda what: report(what, 0.1)
    )
    report("computing the weights' digest", 0.1)
    info = describe_model(checkpoint, vllm_config, context_length, config.numerics_tag, digests)
    facts |= {"vocab_size": info.vocab_size, "eos_token_ids": info.eos_token_ids}
    vllm_config.additional_config[EXTRA_ARGS_KEY] = facts
    report(f"reading {checkpoint.num_weight_bytes / 1e6:,.0f} MB of weights", 0.2)
    try:
        core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    except ValueError as error:  # a pool for less than one request of the longest context is one
        raise ModelUnusable(
            f"vLLM refuses this model or its settings: {error} (--kv-memory-bytes and --num-kv-blocks of the worker "
            "set the pool, --max-model-len the context)"
        ) from error
    engine = VllmEngine(core)
    shape = layout(core)
    scheduler = _scheduler_config(config, info, shape, engine.pool.num_total, window_of_all(core))
    if not can_hand_over(core):
        return VllmCore(scheduler, engine), _ready(config, info, shape, scheduler.num_blocks, numa_node), []
    exchange, slots = make_exchange(core, config, shape)
    ready = _ready(config, info, shape, scheduler.num_blocks, numa_node)
    return VllmCore(scheduler, engine, exchange=exchange), with_region(ready, slots), list(slots.fds)


def _is_cpu(config: EngineConfig) -> bool:
    """Return whether this build of vLLM is for CPUs; raises ModelUnusable if another device is asked for."""
    ours = current_platform.device_type
    asked = config.device.partition(":")[0]
    if asked not in ("auto", ours):
        raise ModelUnusable(f"--device {config.device}, but this vLLM is built for {ours}; install another build of it")
    return bool(ours == "cpu")


def _scheduler_config(
    config: EngineConfig, info: ModelInfo, shape: LayoutInfo, num_blocks: int, window: int | None
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks // shape.num_groups,  # groups of layers share vLLM's blocks
        block_size=shape.tokens_per_block,
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_waiting=config.max_num_waiting,
        window=window,
    )


def _ready(config: EngineConfig, info: ModelInfo, shape: LayoutInfo, num_blocks: int, numa_node: int | None) -> Ready:
    """Return the event that the engine serves, without a region."""
    return Ready(
        model=info,
        layout=shape,
        num_blocks=num_blocks,
        region_id=config.region_id,
        region_bytes=0,
        generations_offset=0,
        num_slots=0,
        bytes_per_slot=shape.bytes_per_block,
        numa_node=numa_node,
    )
