"""Provides what the ways run on: one model, any number of engines over it, and one journal."""

from __future__ import annotations

import os
import random
import select
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tandem_engine.assembly import grammar_masks
from tandem_engine.core import EngineCore
from tandem_engine.execution.compute_thread import SHORT_SECONDS, ComputeThread
from tandem_engine.execution.draft_runner import DraftRunner
from tandem_engine.execution.kv_cache import PagedKVCache, Slots
from tandem_engine.execution.model_runner import ModelRunner
from tandem_engine.execution.staging import StagingMemory
from tandem_engine.messages import (
    AddRequest,
    BlocksSealed,
    EngineEvent,
    MapRegion,
    Mode,
    Refused,
    Reserved,
    SealedBlocks,
    StepDone,
)
from tandem_engine.models.loader import LoadedModel, load_model
from tandem_engine.ops.cpu import CpuOps
from tandem_engine.publisher import PoolPublisher, Publisher
from tandem_engine.scheduling.block_hash import BlockHash, hash_blocks, hash_root
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.settings import EngineConfig
from tandem_engine.staging import StagedPublisher
from tests.checkpoints import make_checkpoint
from tests.tandem_engine.determinism.recording import Journal, RecordingModel, RecordingRunner
from tests.tandem_engine.determinism.request_specs import RequestSpec

_MEAN_TICK_SECONDS = 0.004
_LEAN = {"route": "lean"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("demo", _LEAN),
    "llama": ("llama", _LEAN),
    "mistral": ("mistral", _LEAN),
    "qwen2": ("qwen2", _LEAN),
    "gemma2": ("gemma2", _LEAN),
    "mixtral": ("mixtral", _LEAN),
    "llama, plain torch": ("llama", {"route": "lean", "kernels": "torch"}),
}
"""Kind of checkpoint and settings, by name. The demo's weights are bf16, the others' are float32. All layers of mistral
have a window, so its blocks are dropped; some layers of qwen2 and gemma2 have one."""
LEFT_OUT: dict[str, tuple[str, dict[str, Any]]] = {"llama, plain transformers": ("llama", {"route": "transformers"})}
"""Models of a batch-dependent numerics class: a token's bits depend on the batch, so nothing can be compared."""


def loaded(name: str, folder: Path) -> LoadedModel:
    """Load one of MODELS or LEFT_OUT; its checkpoint is made below `folder`."""
    kind, settings = (MODELS | LEFT_OUT)[name]
    config = EngineConfig(str(make_checkpoint(folder, kind)), device="cpu", num_threads=1, **settings)
    torch.set_num_threads(1)
    return load_model(config, lambda stage, fraction: None)


@dataclass
class Stage:
    """One model, and the random numbers of one way."""

    model: LoadedModel
    rng: random.Random
    journal: Journal
    block_size: int = 16
    overlaps: bool = False
    """Whether the engines run steps on a thread of their own, and take requests meanwhile."""

    def engine(self, num_blocks: int, region_id: str = "", num_slots: int | None = None, **settings: Any) -> Engine:
        """Return a new engine over the model; `settings` are SchedulerConfig's.

        With `num_slots` its pool is private: others read copies of blocks in a ring of so many slots.
        """
        return Engine(self, num_blocks, region_id, settings, num_slots)

    def roomy(
        self, specs: Sequence[RequestSpec], region_id: str = "", num_slots: int | None = None, **settings: Any
    ) -> Engine:
        """Return an engine with blocks for all requests at once."""
        return self.engine(sum(map(self.num_blocks, specs)), region_id, num_slots, **settings)

    def num_blocks(self, spec: RequestSpec) -> int:
        """Return the most blocks that a request can need, plus two."""
        return (-(-spec.max_kv_tokens // self.block_size) + 2) * self.model.geometry.num_groups

    def empty_cache(self, num_blocks: int, *, is_private: bool = False) -> PagedKVCache:
        geometry = replace(self.model.geometry, block_size=self.block_size)
        return PagedKVCache(geometry, num_blocks, torch.device("cpu"), is_private=is_private)

    def hashes_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the hashes of all full blocks, in hex."""
        return [each.hex() for each in hash_blocks(self.root, token_ids, self.block_size)]

    @property
    def root(self) -> BlockHash:
        return hash_root(b"determinism", self.block_size)

    def groups(self, specs: Sequence[RequestSpec], least: int, most: int) -> Iterator[list[RequestSpec]]:
        """Yield all requests, shuffled, in groups of random sizes."""
        left = self.rng.sample(specs, len(specs))
        while left:
            size = self.rng.randint(least, most)
            yield left[:size]
            left = left[size:]

    @contextmanager
    def threads(self, num_threads: int) -> Iterator[None]:
        """Compute with `num_threads` threads."""
        self._use_threads(num_threads)
        try:
            yield
        finally:
            self._use_threads(1)

    def _use_threads(self, num_threads: int) -> None:
        if isinstance(self.model.ops, CpuOps):
            self.model.ops.set_num_threads(num_threads)
        else:
            torch.set_num_threads(num_threads)


class Engine:
    """An EngineCore with its own pool; records its steps in the journal. Each reading of its clock advances it."""

    def __init__(
        self, stage: Stage, num_blocks: int, region_id: str, settings: dict[str, Any], num_slots: int | None = None
    ) -> None:
        self.journal = stage.journal
        self.region_id = region_id
        self.live: set[str] = set()
        """Requests that are not over in this engine."""
        self._stage = stage
        self._seconds = 1.0
        self._ended: deque[EngineEvent] = deque()
        model = RecordingModel(stage.model.model)
        self.cache = stage.empty_cache(num_blocks, is_private=num_slots is not None)
        self.slots = self.cache.slots or Slots(num_slots or 1, self.cache.geometry.bytes_per_block)
        """What others read."""
        masks = grammar_masks(stage.model.info, stage.model.ops)
        plain = ModelRunner(model, stage.model.ops, self.cache, masks=masks)
        runner = RecordingRunner(self._beside(plain) if stage.overlaps else plain, model, self.journal, stage.rng)
        groups = stage.model.geometry.groups
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=stage.block_size,
            context_length=stage.model.info.context_length,
            vocab_size=stage.model.info.vocab_size,
            window=stage.model.window,
            num_window_groups=len(groups) - 1 if groups else None,
            group_window=groups[-1].window if groups else None,
            **{"max_num_batched_tokens": 2048, "max_num_waiting": 4096} | settings,
        )
        clock = lambda: int(self._time() * 1e9)  # noqa: E731
        self.core = EngineCore(config, runner, clock, clock, self._publisher(), overlaps=stage.overlaps)

    def use_draft_model(self, *, is_alone: bool) -> None:
        """Use the model as its own draft model, with a second cache; `is_alone`: in every step, without texts."""
        model = self._stage.model
        geometry = replace(self.cache.geometry, groups=())
        cache = PagedKVCache(geometry, self.cache.num_blocks, torch.device("cpu"))
        runner = DraftRunner(model.model, model.ops, cache, self.cache.generations, model.info.context_length)
        speculator = self.core.scheduler.speculator
        speculator.use_model(runner)
        if is_alone:
            speculator.use([])
            speculator.model_cutoff = 0.0

    @property
    def counters(self) -> Mapping[str, float]:
        """The totals so far."""
        return self.core.scheduler.stats().counters

    def add(
        self,
        spec: RequestSpec,
        answer: Sequence[int] = (),
        mode: Mode = "aggregated",
        *,
        caches: bool = False,
        **fields: Any,
    ) -> None:
        """Add a request with the answer so far; with `caches` its blocks are found and left by their hashes."""
        token_ids = [*spec.prompt, *answer]
        if caches:
            fields |= {"hash_root": self._stage.root.hex(), "block_hashes": self._stage.hashes_of(token_ids)}
        command = AddRequest(spec.request_id, token_ids, len(spec.prompt), spec.sampling, mode, **fields)
        (event,) = self.core.handle(command)
        while isinstance(event, Refused) and event.reason == "kv_full" and self.has_work:
            self.step()  # others wait for blocks, and are not overtaken
            (event,) = self.core.handle(command)
        assert isinstance(event, Reserved), event
        self.live.add(spec.request_id)
        self.journal.counters["added_while_a_step_runs"] += self.core.wake_fd() is not None

    @property
    def has_work(self) -> bool:
        return bool(self._ended) or self.core.has_work()

    def step(self) -> tuple[StepDone, list[SealedBlocks]]:
        """Return the result of a step, and all blocks that it sealed, early or late."""
        sealed: list[SealedBlocks] = []

        def emit(event: EngineEvent) -> None:
            assert isinstance(event, BlocksSealed), event
            sealed.extend(event.sealed)

        done = self._end_of_step() if self._stage.overlaps else self.core.step(emit)
        assert not self.core.take_failures()
        for output in done.outputs:
            self.journal.add_output(output)
            if output.is_last:
                self.live.discard(output.request_id)
        return done, [*sealed, *done.sealed]

    def _end_of_step(self) -> StepDone:
        """Return the result of the next step that ends; another one runs then, unless no work is left."""
        while not self._ended:
            self.core.run_step(self._ended.append)
            if not self._ended and (running := self.core.wake_fd()) is not None:
                select.select([running], [], [])
                os.eventfd_read(running)
        done = self._ended.popleft()
        assert isinstance(done, StepDone), done
        if not self._ended and self.core.wake_fd() is None and self.core.has_work():
            self.core.run_step(self._ended.append)  # plans, so that requests arrive while the step runs; or ends it
        return done

    def preempt_some(self, share: float) -> None:
        """Preempt a random share of the running requests, as a step does whose answers need their blocks."""
        scheduler = self.core.scheduler
        for request in scheduler._running.in_order():
            if self._stage.rng.random() < share:
                scheduler._preempt(request)

    def drain(self) -> None:
        while self.has_work:
            self.step()

    def run(self, specs: Sequence[RequestSpec], *, caches: bool = False) -> None:
        """Answer all requests; they arrive one by one at random times, some with a higher or lower priority."""
        waiting = list(specs)
        while waiting or self.has_work:
            while waiting and (not self.has_work or self._stage.rng.random() < 0.6):
                self.add(waiting.pop(), caches=caches, priority=self._stage.rng.choice([-1, 0, 0, 0, 1]))
            self.step()

    def close(self) -> None:
        """Assert that nothing is left, and add the totals to the journal's."""
        self.core.close()
        stats, publisher = self.core.scheduler.stats(), self.core.publisher
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_held_blocks) == (0, 0, 0, 0)
        if isinstance(publisher, StagedPublisher):
            publisher.ring.check()
            assert not publisher.ring.num_held and not publisher.state["staging_blocks_waiting"]
            self.journal.counters.update({name: int(count) for name, count in publisher.state.items()})
        self.journal.counters.update({name: int(count) for name, count in stats.counters.items()})

    def lend_to(self, reader: Engine) -> None:
        """Let another engine read this engine's pool."""
        slots = self.slots
        command = MapRegion(self.region_id, slots.num_bytes, slots.num_slots, slots.generations_offset)
        reader.core.handle(command, *slots.fds)

    def _beside(self, runner: ModelRunner) -> ComputeThread:
        """Run half of the engines' steps on a thread whatever they take, the others' as they would be in earnest."""
        return ComputeThread(runner, self._stage.rng.choice((0.0, SHORT_SECONDS)))

    def _publisher(self) -> Publisher:
        if self.cache.slots is not None:
            return PoolPublisher(self.region_id, lambda slots: [])
        assert isinstance(self.slots, Slots), "copies are in host memory"
        return StagedPublisher(StagingMemory(self.region_id, self.cache, self.slots), self.cache.generations)

    def _time(self) -> float:
        self._seconds += self._stage.rng.expovariate(1 / _MEAN_TICK_SECONDS)
        return self._seconds
