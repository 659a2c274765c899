"""An engine of one checkpoint whose steps can be timed part by part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig

from benchmarks.engine_profile.timed_ops import Stopwatch, SwitchedRunner, TimedModel, TimedOps
from tandem_engine.core import EngineCore
from tandem_engine.execution.kv_cache import KVGeometry, PagedKVCache
from tandem_engine.execution.model_runner import ModelRunner
from tandem_engine.extents import ExtentRef
from tandem_engine.messages import (
    AbortRequest,
    AddRequest,
    ImportSlab,
    MapRegion,
    Mode,
    Reserved,
    SlabImported,
    StartDecode,
)
from tandem_engine.models.lean.decoder import Decoder
from tandem_engine.models.lean.load import LeanRequest, load_decoder
from tandem_engine.models.lean.registry import find_family
from tandem_engine.ops.cpu import load_cpu_ops
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_machine.cores import allowed_cores

_BLOCK_SIZE = 16
_SPARE_BLOCKS = 16
"""Per request: for its answer."""
_REGION_ID = "contexts"


class ProfiledEngine:
    """A lean decoder on the C++ kernels in float32; raises KernelsUnavailable without a compiler."""

    def __init__(self, folder: Path, num_threads: int, max_batch: int, num_tokens: int) -> None:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        family = find_family(config)
        assert family is not None, "the random models are Llamas"
        cores = allowed_cores()[:num_threads]  # the caller has pinned this process
        ops = load_cpu_ops(num_threads=num_threads, cores=cores if num_threads > 1 else ())
        request = LeanRequest(folder, config, family, config.max_position_embeddings, dtype="float32")
        decoder = load_decoder(request, ops, lambda what: None)
        self.vocab_size = decoder.config.vocab_size
        self._num_tokens = num_tokens
        sizes = decoder.config
        self._geometry = KVGeometry(
            sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, _BLOCK_SIZE, torch.float32, ops.kv_order
        )
        num_blocks = (max_batch + 1) * (num_tokens // _BLOCK_SIZE + _SPARE_BLOCKS)
        cache = PagedKVCache(self._geometry, num_blocks, torch.device("cpu"))
        self.watch = Stopwatch()
        timed = Decoder(
            decoder.config, decoder.weights, decoder.weights.rotary, TimedOps(ops, decoder.weights, self.watch)
        )
        self._runner = SwitchedRunner(
            ModelRunner(decoder, ops, cache), ModelRunner(TimedModel(timed, self.watch), ops, cache), self.watch
        )
        self._core = EngineCore(_scheduler_config(num_blocks, max_batch, num_tokens, self.vocab_size), self._runner)
        self._contexts = self._lend_contexts()
        self._held: list[str] = []
        self._num_requests = 0

    def use_clocks(self, is_timed: bool) -> None:
        """Progress whether the steps from now on are timed part by part."""
        self._runner.is_timed = is_timed

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        """Add a request whose prompt the next step computes, and which that step ends."""
        self._add(token_ids, 1, "aggregated")

    def hold(self, batch: int, num_answer_tokens: int) -> None:
        """Add requests whose contexts are there already: each step from now on gives each of them a token."""
        for _ in range(batch):
            request_id = self._add([10] * self._num_tokens, num_answer_tokens + 1, "decode")
            (imported,) = self._core.handle(ImportSlab(request_id, 0, 0, self._contexts))
            assert isinstance(imported, SlabImported) and not imported.error, imported
            self._core.handle(StartDecode(request_id, [11]))
            self._held.append(request_id)

    def step(self) -> float:
        """Take a step and return its seconds. Raises RuntimeError unless it gave every request a token."""
        began = time.perf_counter()
        done = self._core.step()
        seconds = time.perf_counter() - began
        if len(done.outputs) != max(1, len(self._held)):
            raise RuntimeError(f"a step brought {len(done.outputs)} tokens to {len(self._held)} requests")
        return seconds

    def release(self) -> None:
        """Forget the requests that are held."""
        for request_id in self._held:
            self._core.handle(AbortRequest(request_id))
        self._held = []

    def _add(self, token_ids: Sequence[int], max_tokens: int, mode: Mode) -> str:
        self._num_requests += 1
        sampling = SamplingParams(max_tokens, temperature=0.0)
        request = AddRequest(str(self._num_requests), list(token_ids), len(token_ids), sampling, mode)
        (event,) = self._core.handle(request)
        assert isinstance(event, Reserved), event
        return request.request_id

    def _lend_contexts(self) -> list[ExtentRef]:
        """Map a region with one request's worth of random keys and values, and return where its blocks lie."""
        num_blocks = self._num_tokens // _BLOCK_SIZE
        lender = PagedKVCache(self._geometry, num_blocks, torch.device("cpu"))
        lender.pool.rows.normal_(generator=torch.Generator().manual_seed(1))
        command = MapRegion(_REGION_ID, lender.region.num_bytes, num_blocks, lender.generations_offset)
        self._core.handle(command, lender.region.fd)
        size = self._geometry.bytes_per_block
        return [ExtentRef(_REGION_ID, slot * size, size, slot, lender.generations[slot]) for slot in range(num_blocks)]


def _scheduler_config(num_blocks: int, max_batch: int, num_tokens: int, vocab_size: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        context_length=num_tokens + _SPARE_BLOCKS * _BLOCK_SIZE,
        vocab_size=vocab_size,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=max_batch,
    )
