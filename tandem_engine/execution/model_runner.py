"""Runs the model on one step of the scheduler, and samples its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from tandem_engine.core import RegionError, Ticket
from tandem_engine.execution.block_converter import BlockConverter
from tandem_engine.execution.grammar.compiled import no_guide
from tandem_engine.execution.grammar.masks import GrammarMasks
from tandem_engine.execution.input_batch import BatchBuilder, Stretch
from tandem_engine.execution.kv_cache import PagedKVCache
from tandem_engine.execution.model import Model
from tandem_engine.execution.regions import MappedRegions
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
        self._regions = MappedRegions()
        self._converter = BlockConverter(cache, self._regions)
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

        def when_written() -> None:
            self._cache.stage([block for run in output.runs for block in _sealed_blocks(run, self._block_size)])
            kv_written()

        self._masks.begin(output.runs)
        step = self._ops.step(self._batches.build([_stretch(run) for run in output.runs]))
        logits = self._model.forward(step.token_ids, step, self._cache.pool, step.sample_rows, when_written)
        return LaunchedStep(output, logits)

    def collect(self, ticket: Ticket) -> dict[str, list[Sampled]]:
        """Sample the next tokens of a step that was launched."""
        assert isinstance(ticket, LaunchedStep), "a ticket of this runner"
        runs = ticket.output.runs
        masks = self._masks.take()  # an asynchronous device computes meanwhile
        draws = [_draw(run, masks) for run in runs if run.samples]
        sampled = sample(ticket.logits, draws, self._ops.sample)
        self._cache.stage([block for run in runs for block in _accepted_blocks(run, sampled, self._block_size)])
        return sampled

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
                self._cache.write_blocks(first, self._regions.read(run))
        self._regions.check_generations(extents)
        if self._checksums is not None:
            self._checksums.verify(blocks, extents)
        self._cache.stage(blocks)
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
        self._cache.stage(sorted({part.block for of_extent in parts for part in of_extent}))
        return content.size

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """Return the checksums of complete blocks; empty if this engine computes none."""
        return self._checksums.of(blocks) if self._checksums is not None else []

    def map_region(self, command: MapRegion, fd: int) -> None:
        """Map another process's region read-only; the caller closes `fd`. Raises RegionError."""
        self._regions.map(command, fd)

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


def _accepted_blocks(run: ScheduledRun, sampled: Mapping[str, Sequence[Sampled]], block_size: int) -> Iterator[int]:
    """Yield the blocks that accepted drafts completed."""
    if not run.draft_tokens:
        return
    num_accepted = len(sampled[run.request.request_id]) - 1
    for table in run.request.tables:
        yield from table[run.end // block_size : (run.end + num_accepted) // block_size]


def _sealed_blocks(run: ScheduledRun, block_size: int) -> Iterator[int]:
    """Yield the blocks that this run's known tokens completed; at the end of a prefill also its partly filled tail."""
    is_over = run.samples and run.request.mode == "prefill"
    last = -(-run.end // block_size) if is_over else run.end // block_size
    for table in run.request.tables:
        yield from table[run.first_position // block_size : last]
