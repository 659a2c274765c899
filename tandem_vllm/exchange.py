"""Joins vLLM's pool with a region that others read, and with the connector that vLLM's scheduler asks."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from vllm.v1.engine.core import EngineCore

from tandem_engine.errors import ModelUnusable
from tandem_engine.execution.kv_cache import Slots
from tandem_engine.execution.staging import num_staging_slots
from tandem_engine.layout import LayoutInfo
from tandem_engine.messages import Ready
from tandem_engine.settings import EngineConfig
from tandem_engine.staging import StagedPublisher, max_held_slots
from tandem_vllm.arrivals import Arrivals
from tandem_vllm.connector import TandemConnector, pool_layers
from tandem_vllm.hand_over import Exchange
from tandem_vllm.memory import BlockMemory
from tandem_vllm.model import layer_names
from tandem_vllm.vllm_blocks import VllmBlocks


def can_hand_over(core: EngineCore) -> bool:
    """Whether blocks can be exchanged: vLLM's pool is in this process, in one group, and has a prefix cache."""
    scheduler: Any = core.scheduler
    cache = scheduler.kv_cache_config
    is_here = core.vllm_config.parallel_config.world_size == 1
    is_plain = len(cache.kv_cache_groups) == 1 and not cache.needs_kv_cache_zeroing
    return is_here and is_plain and isinstance(scheduler.connector, TandemConnector)


def make_exchange(core: EngineCore, config: EngineConfig, shape: LayoutInfo) -> tuple[Exchange, Slots]:
    """Return vLLM's pool as `VllmCore` uses it, and the region; raises ModelUnusable."""
    scheduler: Any = core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    assert scheduler.hash_block_size == scheduler.block_size == shape.tokens_per_block, "one group has one block size"
    layers = pool_layers()
    num_slots = num_staging_slots(config.kv_staging_bytes, pool.num_gpu_blocks - 1, shape.bytes_per_block)
    slots = Slots(num_slots, shape.bytes_per_block)
    try:
        memory = BlockMemory(config.region_id, [layers[name] for name in layer_names(core)], slots)
    except ValueError as error:
        raise ModelUnusable(str(error)) from error
    if config.verify_kv:
        memory.checksums_of = _checksums(memory, slots)
    blocks = VllmBlocks(pool, shape.tokens_per_block)
    arrivals = Arrivals(blocks, memory, shape.tokens_per_block)
    scheduler.connector.arrivals = arrivals
    return Exchange(blocks, memory, StagedPublisher(memory, blocks.generations), arrivals), slots


def with_region(ready: Ready, slots: Slots) -> Ready:
    """Return the event with the facts of the region, whose descriptors come with it."""
    return replace(
        ready,
        region_bytes=slots.num_bytes,
        generations_offset=slots.generations_offset,
        num_slots=slots.num_slots,
        bytes_per_slot=slots.bytes_per_slot,
        max_held_slots=max_held_slots(slots.num_slots),
    )


def _checksums(memory: Any, slots: Slots) -> Any:
    try:
        from tandem_engine.execution.block_checksums import BlockChecksums
    except ImportError as error:
        raise ModelUnusable(
            f"--verify-kv needs the package xxhash in vLLM's virtual environment: {error}; install it there"
        ) from error
    return BlockChecksums(memory, slots)
