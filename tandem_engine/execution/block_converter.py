"""Copies blocks of another layout into a pool: another dtype, another order of numbers, another number of tokens.

    mapped region ──▶ staging, checked there: generations, checksums ──▶ pool, converted

Numbers are rounded as torch rounds, to nearest even, so the pool gets what its own worker would have stored of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from tandem_engine.errors import RegionError
from tandem_engine.execution.block_order import BlockShape, keys_and_values
from tandem_engine.execution.mapped_regions import MappedRegions
from tandem_engine.execution.pool_views import PoolViews
from tandem_engine.execution.thread_pool import parallel_for
from tandem_engine.extents import BlockPart, ExtentRef
from tandem_engine.layout import SourceLayout

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_SERIAL_NUMBERS = 32_767
"""Torch copies so many in the caller's thread. Its own threads spin while they wait: where other processes need the
cores, a copy on two of them took fifty times as long."""

Content = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


class BlockConverter:
    """Writes parts of one pool's blocks from blocks of other layouts."""

    def __init__(self, pool: PoolViews, regions: MappedRegions) -> None:
        self._pool = pool
        self._regions = regions
        self._staging = torch.empty(0, dtype=torch.uint8)
        """As large as the largest call so far: the engine imports pieces of a few megabytes, or one block."""

    def read(self, extents: Sequence[ExtentRef], layout: SourceLayout) -> Content:
        """Copy the bytes of extents, a row each, to a buffer that the next call overwrites; raises RegionError.

        The caller checks them before it calls `write`.
        """
        shape, dtype = self._shape(layout), self._dtype(layout)
        size = shape.num_elements * dtype.itemsize
        for extent in extents:
            if extent.num_bytes != size or layout.bytes_per_block != size:
                raise RegionError(
                    f"slot {extent.slot} of region {extent.region_id} has {extent.num_bytes} bytes, a block of "
                    f"{layout.tokens_per_block} tokens in {layout.dtype} has {size} with this worker's layers and heads"
                )
        if len(self._staging) < len(extents) * size:
            self._staging = torch.empty(len(extents) * size, dtype=torch.uint8)
        content: Content = self._staging[: len(extents) * size].view(len(extents), size).numpy()

        def copy(start: int, end: int) -> None:
            for index in range(start, end):
                np.copyto(content[index], self._regions.read(extents[index]))

        parallel_for(copy, len(extents), size)
        self._regions.check_generations(extents)
        return content

    def write(self, content: Content, layout: SourceLayout, parts: Sequence[Sequence[BlockPart]]) -> None:
        """Convert blocks that `read` returned; `parts` has those of our blocks that each of them fills."""
        rows = torch.from_numpy(content).to(self._pool.device).view(self._dtype(layout))
        try:
            keys, values = keys_and_values(rows, layout.order, self._shape(layout))
        except ValueError as error:
            raise RegionError(f"KV blocks cannot be converted: {error}") from error
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for of_source, blocks, part in _copies(parts):
            theirs = slice(part.source_first, part.source_first + part.num_tokens)
            here = slice(part.first, part.first + part.num_tokens)
            for views in self._pool.parts:
                for source, target in ((keys, views.keys), (values, views.values)):
                    numbers = source[of_source, views.layers, :, theirs]
                    copies += _cut(target[blocks, :, :, here], numbers, self._most_numbers)

        def convert(start: int, end: int) -> None:
            for target, source in copies[start:end]:
                target.copy_(source)
                self._check_range(target, layout)

        if self._pool.device.type == "cpu":
            parallel_for(convert, len(copies), content.size // max(1, len(copies)))
        else:
            convert(0, len(copies))

    @property
    def _most_numbers(self) -> int:
        return _SERIAL_NUMBERS if self._pool.device.type == "cpu" else sys.maxsize

    def _shape(self, layout: SourceLayout) -> BlockShape:
        return replace(self._pool.shape, token=layout.tokens_per_block)

    def _dtype(self, layout: SourceLayout) -> torch.dtype:
        if (dtype := _DTYPES.get(layout.dtype)) is None:
            raise RegionError(f"KV blocks in {layout.dtype} cannot be converted, only {', '.join(_DTYPES)}")
        return dtype

    def _check_range(self, written: torch.Tensor, layout: SourceLayout) -> None:
        """Refuse numbers that are infinite in float16, which has fewer bits for the exponent than the others."""
        is_narrower = written.dtype == torch.float16 and layout.dtype != "float16"
        if is_narrower and not torch.isfinite(written).all():
            raise RegionError(f"KV blocks in {layout.dtype} have numbers beyond the range of float16")


def _cut(target: torch.Tensor, source: torch.Tensor, most_numbers: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of both tensors, cut along their first dimensions, with at most so many numbers each."""
    if target.numel() <= most_numbers or target.dim() <= 2:
        yield target, source
        return
    num_rows = most_numbers // target[0].numel()
    if num_rows:
        yield from zip(torch.split(target, num_rows), torch.split(source, num_rows), strict=True)
    else:
        for part, of_source in zip(target, source, strict=True):
            yield from _cut(part, of_source, most_numbers)


def _copies(parts: Sequence[Sequence[BlockPart]]) -> Iterator[tuple[slice, slice, BlockPart]]:
    """Yield the sources and our blocks of each copy, and the places in them; blocks at equal distances are one copy."""
    by_place: dict[tuple[int, int, int], list[tuple[int, BlockPart]]] = {}
    for source, of_source in enumerate(parts):
        for part in of_source:
            by_place.setdefault((part.first, part.source_first, part.num_tokens), []).append((source, part))
    for pairs in by_place.values():
        for sources, blocks in _runs([(source, part.block) for source, part in pairs]):
            yield sources, blocks, pairs[0][1]


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, slice]]:
    """Yield slices of sources, which grow, and of blocks, which may not."""
    start = 0
    while start < len(pairs):
        (source, block), end = pairs[start], start + 1
        step = (1, 1)
        if end < len(pairs) and pairs[end][1] > block:
            step = (pairs[end][0] - source, pairs[end][1] - block)
            while end < len(pairs) and pairs[end] == (pairs[end - 1][0] + step[0], pairs[end - 1][1] + step[1]):
                end += 1
        last_source, last_block = pairs[end - 1]
        yield slice(source, last_source + 1, step[0]), slice(block, last_block + 1, step[1])
        start = end
