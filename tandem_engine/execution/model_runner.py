"""Runs the model on one step of the scheduler, and samples its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from tandem_engine.core import Ticket
from tandem_engine.errors import RegionError
from tandem_engine.execution.block_converter import BlockConverter
from tandem_engine.execution.cuda_vmm import Driver
from tandem_engine.execution.grammar.compiled import no_guide
from tandem_engine.execution.grammar.masks import GrammarMasks
from tandem_engine.execution.input_batch import BatchBuilder, Stretch
from tandem_engine.execution.kv_cache import PagedKVCache
from tandem_engine.execution.mapped_regions import MappedRegions
from tandem_engine.execution.model import Model
from tandem_engine.execution.pool_views import views_of_pool
from tandem_engine.execution.sampler import Draw, sample
from tandem_engine.extents import BlockPart
from tandem_engine.layout import SourceLayout
from tandem_engine.messages import ExtentRef, MapRegion
from tandem_engine.ops.base import Ops
from tandem_engine.ops.sampling import Words
from tandem_engine.scheduling.batch import ScheduledRun, SchedulerOutput
from tandem_engine.scheduling.request import Request, Sampled

if TYPE_CHECKING:
    from tandem_engine.execution.block_checksums import BlockChecksums


class LaunchedStep(NamedTuple):
    """A step whose logits are computed, or will be by the device."""

    output: SchedulerOutput
    logits: torch.Tensor
    """[rows that sample, vocab_size]."""

    @property
    def is_running(self) -> bool:
        """False: nobody tells when a device is done, `collect` waits for it."""
        return False


class ModelRunner:
    """Implements `tandem_engine.core.Runner` with a model and a paged KV cache; reads requests, changes none."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        cache: PagedKVCache,
        checksums: BlockChecksums | None = None,
        masks: GrammarMasks | None = None,
    ) -> None:
        self._model = model
        self._ops = ops
        self._cache = cache
        self._checksums = checksums
        self._masks = masks or GrammarMasks(no_guide)
        self._batches = BatchBuilder(cache.geometry.block_size, cache.device)
        self._regions = MappedRegions(partial(Driver, cache.ordinal))
        self._converter = BlockConverter(views_of_pool(cache), self._regions)
        self.generations = cache.generations

    def prepare(self, request: Request) -> bool:
        """Start to compile a request's grammar, if it has one; return whether it is ready."""
        return self._masks.prepare(request)

    @property
    def wake_fd(self) -> int | None:
        """None: steps run on the caller's thread or on a device."""
        return None

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput, kv_written: Callable[[], None] = lambda: None) -> LaunchedStep:
        """Compute the logits of all runs and write their KV to their blocks; an asynchronous device goes on alone.

        The KV of wrong drafts is behind the tokens that count; the next step overwrites it.
        """
        self._masks.begin(output.runs)
        step = self._ops.step(self._batches.build([_stretch(run) for run in output.runs]))
        logits = self._model.forward(step.token_ids, step, self._cache.pool, step.sample_rows, kv_written)
        return LaunchedStep(output, logits)

    def collect(self, ticket: Ticket) -> dict[str, list[Sampled]]:
        """Sample the next tokens of a step that was launched."""
        assert isinstance(ticket, LaunchedStep), "a ticket of this runner"
        masks = self._masks.take()  # an asynchronous device computes meanwhile
        draws = [_draw(run, masks) for run in ticket.output.runs if run.samples]
        return sample(ticket.logits, draws, self._ops.sample)

    def import_blocks(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> int:
        """Copy each extent into the block beside it and return the bytes copied; raises RegionError, CorruptBlock."""
        bytes_per_block = self._cache.geometry.bytes_per_block
        for extent in extents:
            if extent.num_bytes != bytes_per_block:
                raise RegionError(
                    f"slot {extent.slot} of region {extent.region_id} has {extent.num_bytes} bytes, "
                    f"a block here {bytes_per_block}; both workers must serve the same layout"
                )
        for _, of_region in groupby(zip(blocks, extents, strict=True), key=lambda pair: pair[1].region_id):
            targets, sources = zip(*of_region, strict=True)
            for first, run in _runs(targets, sources):
                self._regions.copy(run, self._cache, first)
        self._regions.check_generations(extents)
        if self._checksums is not None:
            self._checksums.verify(blocks, extents)
        return len(extents) * bytes_per_block

    def convert_blocks(
        self, parts: Sequence[Sequence[BlockPart]], extents: Sequence[ExtentRef], layout: SourceLayout
    ) -> int:
        """Fill the parts beside each extent, a block of `layout`; return the bytes read.

        Raises RegionError, CorruptBlock; then parts may have been written, and nobody may read them.
        """
        content = self._converter.read(extents, layout)
        if self._checksums is not None:
            self._checksums.verify_copies(list(content), extents)
        self._converter.write(content, layout, parts)
        return content.size

    def checksums(self, slots: Sequence[int]) -> list[int]:
        """Return the checksums of slots of the region that others read; empty if this engine computes none."""
        return self._checksums.of(slots) if self._checksums is not None else []

    def map_region(self, command: MapRegion, *fds: int) -> None:
        """Map another process's region read-only; the caller closes `fds`. Raises RegionError."""
        self._regions.map(command, *fds)

    def unmap_region(self, region_id: str) -> None:
        self._regions.unmap(region_id)

    def close(self) -> None:
        """Do nothing: this runner has no thread."""

    @property
    def _block_size(self) -> int:
        return self._cache.geometry.block_size


def _runs(blocks: Sequence[int], extents: Sequence[ExtentRef]) -> Iterator[tuple[int, ExtentRef]]:
    """Yield the copies; blocks that are adjacent on both sides are one copy, which is twice as fast."""
    offsets = np.array([extent.offset for extent in extents])
    is_beside = (np.diff(offsets) == extents[0].num_bytes) & (np.diff(blocks) == 1)
    starts = [0, *(np.flatnonzero(~is_beside) + 1).tolist(), len(extents)]
    for start, end in pairwise(starts):
        yield blocks[start], replace(extents[start], num_bytes=(end - start) * extents[start].num_bytes)


def _stretch(run: ScheduledRun) -> Stretch:
    request = run.request
    token_ids = [*request.token_ids[run.first_position : run.end], *run.draft_tokens]
    return Stretch(run.first_position, token_ids, request.tables, 1 + len(run.draft_tokens) if run.samples else 0)


def _draw(run: ScheduledRun, masks: Mapping[str, Sequence[Words | None]]) -> Draw:
    request = run.request
    return Draw(
        request.request_id,
        request.sampling,
        request.choice_seeds,
        request.token_ids,
        request.num_prompt_tokens,
        run.draft_tokens,
        masks.get(request.request_id, ()),
    )
