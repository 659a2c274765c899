"""Builds a vLLM engine of a worker's settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm
from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from tandem_engine.adapters import AdapterFiles, find_adapters
from tandem_engine.cores import num_threads
from tandem_engine.errors import ModelUnusable
from tandem_engine.messages import AdapterInfo, LayoutInfo, ModelInfo, Ready
from tandem_engine.models.checkpoint import Progress, find_checkpoint
from tandem_engine.models.digest import DigestCache
from tandem_engine.process import Core
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.settings import EngineConfig
from tandem_vllm.arguments import engine_args, network_of
from tandem_vllm.core import VllmCore
from tandem_vllm.drawing import EXTRA_ARGS_KEY
from tandem_vllm.engine import VllmEngine
from tandem_vllm.exchange import can_hand_over, make_exchange, with_region
from tandem_vllm.hosts import Followers, Place, use_network
from tandem_vllm.model import describe_model, layout, window_of_all

VERSIONS = f"vLLM {vllm.__version__}"
"""What all hosts of an engine must run."""


class Prepared(NamedTuple):
    """What vLLM is to load."""

    config: VllmConfig
    model: ModelInfo
    adapters: Sequence[AdapterFiles]
    num_weight_bytes: int


def assemble(config: EngineConfig, report: Progress, numa_node: int | None) -> tuple[Core, object, list[int]]:
    """Load the model with vLLM; raises ModelUnusable, whose message names the remedy, and HostFailed."""
    if config.kv_region == "device":
        raise ModelUnusable("--kv-region device is for Tandem's own engine; leave it out, vLLM's blocks are staged")
    torch.set_num_threads(num_threads(config))
    network = network_of(config)
    use_network(network.address)
    followers = Followers.wait(config, network, VERSIONS, report) if network.num_hosts > 1 else None
    prepared = prepare(config, report, followers.place if followers is not None else None)
    if followers is not None:
        followers.check(prepared.model)
        followers.watch(_end)
    report(f"reading {prepared.num_weight_bytes / 1e6:,.0f} MB of weights", 0.2)
    try:
        executor = Executor.get_class(prepared.config)
        core = EngineCore(prepared.config, executor, log_stats=False, executor_fail_callback=_on_failure(prepared))
    except ValueError as error:  # a pool for less than one request of the longest context is one
        raise ModelUnusable(
            f"vLLM refuses this model or its settings: {error} (--kv-memory-bytes and --num-kv-blocks of the worker "
            "set the pool, --max-model-len the context)"
        ) from error
    info, adapters = prepared.model, prepared.adapters
    engine = VllmEngine(core, adapters)
    shape = layout(core)
    names = frozenset(each.name for each in adapters)
    scheduler = _scheduler_config(config, info, shape, engine.pool.num_total, window_of_all(core))
    if not can_hand_over(core):
        ready = _ready(config, info, shape, scheduler.num_blocks, numa_node)
        return VllmCore(scheduler, engine, adapters=names), ready, []
    exchange, slots = make_exchange(core, config, shape)
    ready = _ready(config, info, shape, scheduler.num_blocks, numa_node)
    return VllmCore(scheduler, engine, exchange=exchange, adapters=names), with_region(ready, slots), list(slots.fds)


def prepare(config: EngineConfig, report: Progress, place: Place | None) -> Prepared:
    """Find the model and its adapters, and make vLLM's settings of ours; raises ModelUnusable.

    `place`: of this host, if the engine has several.
    """
    checkpoint = find_checkpoint(config.model, config.served_model_name, report, config.revision)
    is_cpu = _is_cpu(config)
    adapters = find_adapters(config.adapters)
    facts: dict[str, Any] = {"tokenizer_path": checkpoint.assets.get("tokenizer.json", "")}
    try:
        vllm_config = engine_args(
            config, str(checkpoint.folder), is_cpu, {EXTRA_ARGS_KEY: facts}, adapters, place
        ).create_engine_config(headless=place is not None and place.rank > 0)
    except ValueError as error:
        raise ModelUnusable(f"vLLM refuses this model or its settings: {error}") from error
    if is_cpu:
        _check_heads(vllm_config.model_config)
    context_length = vllm_config.model_config.max_model_len - 1
    digests = DigestCache(
        Path(config.state_dir).expanduser() if config.state_dir else None, lambda what: report(what, 0.1)
    )
    report("computing the weights' digest", 0.1)
    info = describe_model(checkpoint, vllm_config, context_length, config.numerics_tag, digests)
    info = replace(info, adapters=[AdapterInfo(each.name, each.digest) for each in adapters])
    facts |= {"vocab_size": info.vocab_size, "eos_token_ids": info.eos_token_ids}
    vllm_config.additional_config[EXTRA_ARGS_KEY] = facts
    return Prepared(vllm_config, info, adapters, checkpoint.num_weight_bytes)


def _on_failure(prepared: Prepared) -> Callable[[], None] | None:
    """Return what ends this process when vLLM finds that a rank has ended; None: there is no other rank."""
    several = prepared.config.parallel_config.world_size > 1
    return (lambda: _end("a rank of this engine has ended")) if several else None


def _end(reason: str) -> None:
    """End this process, on any thread: an engine without all of its ranks would wait for them for minutes."""
    print(f"{reason}: the engine ends", file=sys.stderr, flush=True)
    os._exit(1)


def _check_heads(model: Any) -> None:
    """Refuse heads that vLLM's attention on CPUs has no code for: it would only fail in the first step."""
    size, sizes = model.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    if not model.use_mla and size not in sizes:
        raise ModelUnusable(
            f"this model's attention heads have {size} dimensions, and those of vLLM on a CPU must have one of "
            f"{', '.join(map(str, sizes))}; start the worker with --engine tandem"
        )


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
