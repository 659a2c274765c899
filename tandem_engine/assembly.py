"""Builds an engine from a model, a block pool and a scheduler."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tandem_engine.core import EngineCore
from tandem_engine.cores import num_threads
from tandem_engine.execution.device_pool import allocate_region
from tandem_engine.execution.draft_runner import DraftRunner
from tandem_engine.execution.grammar.masks import GrammarMasks
from tandem_engine.execution.grammar.matcher import Compile, GrammarFailed
from tandem_engine.execution.kv_cache import PagedKVCache
from tandem_engine.execution.model_runner import ModelRunner
from tandem_engine.execution.pool_size import choose_num_blocks
from tandem_engine.execution.thread_pool import use_threads
from tandem_engine.messages import ModelInfo, Ready
from tandem_engine.models.checkpoint import Progress
from tandem_engine.models.draft import load_draft_model
from tandem_engine.models.loader import LoadedModel, load_model
from tandem_engine.ops.base import Ops
from tandem_engine.ops.cpu import CpuOps
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.settings import EngineConfig

if TYPE_CHECKING:
    from tandem_engine.execution.block_checksums import BlockChecksums

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AssembledEngine:
    core: EngineCore
    ready: Ready
    region_fds: tuple[int, ...]
    """Descriptors of the pool's region; the cache owns them."""


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
    )
    num_tokens = num_blocks * config.block_size // loaded.geometry.num_groups
    report(f"making room for {num_tokens:,} tokens of KV cache", 0.9)
    cache = _cache(config, loaded, num_blocks)
    checksums = _checksums(cache) if config.verify_kv else None
    masks = grammar_masks(loaded.info, loaded.ops)
    runner = ModelRunner(loaded.model, loaded.ops, cache, checksums, masks)
    core = EngineCore(_scheduler_config(config, loaded, num_blocks), runner)
    if draft is not None:
        core.scheduler.speculator.use_model(_draft_runner(draft, cache))
    return AssembledEngine(core, _ready(config, loaded, cache, numa_node), cache.region_fds)


def _cache(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> PagedKVCache:
    region = None
    if config.kv_region == "device":
        region = allocate_region(loaded.device, num_blocks, loaded.geometry.bytes_per_block)
    return PagedKVCache(loaded.geometry, num_blocks, loaded.device, device_region=region)


def _checksums(cache: PagedKVCache) -> BlockChecksums:
    from tandem_engine.execution.block_checksums import (
        BlockChecksums,  # imports xxhash, which only engines that verify need
    )

    return BlockChecksums(cache)


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
        library = ops.library if isinstance(ops, CpuOps) else None
        return Guide(Path(tokenizer_path), info.vocab_size, info.eos_token_ids, library)
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
    cache = PagedKVCache(draft.geometry, target.num_blocks, draft.device, staging=False)
    return DraftRunner(draft.model, draft.ops, cache, target.generations, draft.info.context_length)


def _ready(config: EngineConfig, loaded: LoadedModel, cache: PagedKVCache, numa_node: int | None) -> Ready:
    return Ready(
        model=loaded.info,
        layout=loaded.geometry.layout(),
        num_blocks=cache.num_blocks,
        region_id=config.region_id,
        region_bytes=cache.region_bytes,
        generations_offset=cache.generations_offset,
        numa_node=numa_node,
        region_kind=config.kv_region,
    )
