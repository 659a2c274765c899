"""Builds an engine from a model, a block pool and a scheduler."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tandem_engine.core import EngineCore, Runner
from tandem_engine.cores import num_threads
from tandem_engine.device_memory import hold
from tandem_engine.execution.compute_thread import ComputeThread
from tandem_engine.execution.device_pool import allocate_region
from tandem_engine.execution.draft_runner import DraftRunner
from tandem_engine.execution.grammar.masks import GrammarMasks
from tandem_engine.execution.grammar.matcher import Compile, GrammarFailed
from tandem_engine.execution.kv_cache import DeviceSlots, PagedKVCache, Slots
from tandem_engine.execution.model_runner import ModelRunner
from tandem_engine.execution.pool_size import choose_num_blocks
from tandem_engine.execution.staging import StagingMemory, num_staging_slots
from tandem_engine.execution.thread_pool import use_threads
from tandem_engine.messages import ModelInfo, Ready
from tandem_engine.models.checkpoint import Progress
from tandem_engine.models.draft import load_draft_model
from tandem_engine.models.loader import LoadedModel, load_model
from tandem_engine.ops.base import Ops
from tandem_engine.publisher import PoolPublisher, Publisher
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.settings import EngineConfig
from tandem_engine.staging import StagedPublisher, max_held_slots

if TYPE_CHECKING:
    from tandem_engine.execution.block_checksums import BlockChecksums

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AssembledEngine:
    core: EngineCore
    ready: Ready
    region_fds: tuple[int, ...]
    """Descriptors of the region that others read; the core owns them."""


def assemble(config: EngineConfig, report: Progress, numa_node: int | None = None) -> AssembledEngine:
    """Build the engine; raises ModelUnusable, whose message names the remedy.

    `numa_node` is where this process's memory comes from, as `use_memory_node` returns it.
    """
    torch.set_num_threads(num_threads(config))
    use_threads(num_threads(config))
    loaded = load_model(config, report, numa_node=numa_node)
    draft = _draft_model(config, loaded, report, numa_node)
    num_blocks = choose_num_blocks(
        config,
        loaded.geometry,
        loaded.info.context_length,
        loaded.device,
        loaded.mapped_bytes + (draft.mapped_bytes if draft else 0),
        draft.geometry.bytes_per_block if draft else 0,
        loaded.weight_bytes,
        numa_node,
        loaded.info.vocab_size,
    )
    num_tokens = num_blocks * config.block_size // loaded.geometry.num_groups
    report(f"making room for {num_tokens:,} tokens of KV cache", 0.9)
    cache = _cache(config, loaded, num_blocks)
    slots = cache.slots or _staging_slots(config, cache)
    checksums = _checksums(cache, slots) if config.verify_kv else None
    masks = grammar_masks(loaded.info, loaded.ops)
    model_runner = ModelRunner(loaded.model, loaded.ops, cache, checksums, masks)
    overlaps = config.overlap == "on" or (config.overlap == "auto" and loaded.device.type == "cuda")
    runs_beside = overlaps and loaded.device.type == "cpu"
    runner: Runner = ComputeThread(model_runner) if runs_beside else model_runner
    publisher = _publisher(config, cache, slots, model_runner)
    core = EngineCore(_scheduler_config(config, loaded, num_blocks), runner, publisher=publisher, overlaps=overlaps)
    if draft is not None:
        core.scheduler.speculator.use_model(_draft_runner(draft, cache))
    return AssembledEngine(core, _ready(config, loaded, cache, slots, numa_node), slots.fds)


def _cache(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> PagedKVCache:
    if config.kv_region == "device":
        region = allocate_region(loaded.device, num_blocks, loaded.geometry.bytes_per_block)
        hold(num_blocks * loaded.geometry.bytes_per_block)
        return PagedKVCache(loaded.geometry, num_blocks, loaded.device, device_region=region)
    return PagedKVCache(loaded.geometry, num_blocks, loaded.device, is_private=_is_staged(config, loaded))


def _is_staged(config: EngineConfig, loaded: LoadedModel) -> bool:
    return config.kv_staging == "always" or loaded.device.type != "cpu"


def _staging_slots(config: EngineConfig, cache: PagedKVCache) -> Slots:
    bytes_per_block = cache.geometry.bytes_per_block
    return Slots(num_staging_slots(config.kv_staging_bytes, cache.num_blocks, bytes_per_block), bytes_per_block)


def _wait_written(device: torch.device) -> None:
    """Wait until the kernels that write blocks have ended, where they run beside this thread: readers map the pool."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _publisher(config: EngineConfig, cache: PagedKVCache, slots: Slots | DeviceSlots, runner: ModelRunner) -> Publisher:
    if cache.slots is not None:
        return PoolPublisher(config.region_id, runner.checksums, partial(_wait_written, cache.device))
    assert isinstance(slots, Slots), "staged blocks are in host memory"
    return StagedPublisher(StagingMemory(config.region_id, cache, slots, runner.checksums), cache.generations)


def _checksums(cache: PagedKVCache, slots: Slots | DeviceSlots) -> BlockChecksums:
    from tandem_engine.execution.block_checksums import (
        BlockChecksums,  # imports xxhash, which only engines that verify need
    )

    return BlockChecksums(cache, slots)


def grammar_masks(info: ModelInfo, ops: Ops) -> GrammarMasks:
    """Return the grammar masks of a model; the first request with a grammar reads the tokenizer."""
    return GrammarMasks(lambda: _guide(info, ops))


def _guide(info: ModelInfo, ops: Ops) -> Compile:
    tokenizer_path = info.asset_paths.get("tokenizer.json")
    if tokenizer_path is None or not info.eos_token_ids:
        missing = "tokenizer.json" if tokenizer_path is None else "token that ends an answer"
        raise GrammarFailed(f"{info.model_id} has no {missing}: structured output is not possible with it")
    try:
        from tandem_engine.execution.grammar.guided import Guide  # an optional package, and some megabytes
    except ImportError as error:
        raise GrammarFailed("llguidance is not installed here; install it for structured output") from error
    try:
        return Guide(Path(tokenizer_path), info.vocab_size, info.eos_token_ids, ops.library)
    except ValueError as error:
        raise GrammarFailed(f"llguidance cannot read the tokenizer of {info.model_id}: {error}") from error


def _scheduler_config(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> SchedulerConfig:
    groups = loaded.geometry.groups
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        context_length=loaded.info.context_length,
        vocab_size=loaded.info.vocab_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_waiting=config.max_num_waiting,
        max_prefill_tokens_with_decodes=config.max_prefill_tokens_with_decodes,
        max_prefill_context_with_decodes=config.max_prefill_context_with_decodes,
        max_draft_tokens=_max_draft_tokens(config, loaded),
        window=loaded.window,
        num_window_groups=len(groups) - 1 if groups else None,
        group_window=groups[-1].window if groups else None,
    )


def _max_draft_tokens(config: EngineConfig, loaded: LoadedModel) -> int:
    """Return 0 for a model whose bits depend on the batch: drafts could change its tokens."""
    return config.max_draft_tokens if config.speculation == "auto" and loaded.is_batch_invariant else 0


def _draft_model(
    config: EngineConfig, loaded: LoadedModel, report: Progress, numa_node: int | None
) -> LoadedModel | None:
    """Load the draft model, if there is one and drafts are possible."""
    if not config.draft_model:
        return None
    if not _max_draft_tokens(config, loaded):
        log.warning("the draft model %s is not loaded: this engine uses no drafts", config.draft_model)
        return None
    return load_draft_model(config, loaded, report, numa_node)


def _draft_runner(draft: LoadedModel, target: PagedKVCache) -> DraftRunner:
    cache = PagedKVCache(draft.geometry, target.num_blocks, draft.device)
    return DraftRunner(draft.model, draft.ops, cache, target.generations, draft.info.context_length)


def _ready(
    config: EngineConfig, loaded: LoadedModel, cache: PagedKVCache, slots: Slots | DeviceSlots, numa_node: int | None
) -> Ready:
    return Ready(
        model=loaded.info,
        layout=loaded.geometry.layout(),
        num_blocks=cache.num_blocks,
        region_id=config.region_id,
        region_bytes=slots.num_bytes,
        generations_offset=slots.generations_offset,
        num_slots=slots.num_slots,
        bytes_per_slot=slots.bytes_per_slot,
        max_held_slots=0 if cache.slots is not None else max_held_slots(slots.num_slots),
        numa_node=numa_node,
        region_kind=config.kv_region,
        tells_points=True,
    )
