"""Builds the numbers of one step's forward pass on the host.

All stretches of a step are concatenated in one flat token dimension. The rows that sample are the last known token of a
stretch and the drafts behind it.

    token_ids      run 0: t0 t1 t2 | run 1: t9 d d | run 2: t0 t1 ...
    positions               0  1  2 |         9 10 11 |       0  1
    slots          block * block_size + offset of each

If layers are in several groups, each group has its own block tables and slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tandem_engine.ops.base import HostBatch, Integers

_FEW = 4


class Stretch(NamedTuple):
    """Adjacent tokens of one request in one forward pass."""

    first_position: int
    token_ids: Sequence[int]
    tables: Sequence[list[int]]
    """The request's block tables by group; every block that the tokens are written to is in them."""
    num_sampled: int
    """Of the last tokens: those behind which a token is sampled."""


class BatchBuilder:
    """Builds batches for one model. Two buffers take turns: a batch is valid until the next but one is built."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        """For CUDA the buffers are pinned, so that an upload does not wait."""
        self._block_size = block_size
        self._is_pinned = device.type == "cuda"
        self._buffers: list[Integers] = [np.empty(0, np.int64)] * 2

    def build(self, stretches: Sequence[Stretch]) -> HostBatch:
        """Return the batch of some stretches, at least one."""
        token_ids, sampled, runs = array("q"), array("q"), array("q")
        tables = [array("q") for _ in stretches[0].tables]
        for stretch in stretches:
            start, num_tokens = stretch.first_position, len(stretch.token_ids)
            runs.extend((len(token_ids), start, num_tokens, len(tables[0])))
            token_ids.extend(stretch.token_ids)
            sampled.extend(range(len(token_ids) - stretch.num_sampled, len(token_ids)))
            num_blocks = -(-(start + num_tokens) // self._block_size)
            for table, of_group in zip(tables, stretch.tables, strict=True):
                table.fromlist(of_group[:num_blocks])
        sizes = (len(token_ids), len(sampled), len(stretches), len(tables[0]), len(tables))
        batch = HostBatch.sized(*sizes, allocate=self._next_buffer)
        given = sum((sampled, runs, *tables), token_ids)  # in the buffer's order
        batch.buffer[: len(given)] = given
        self._place(batch)
        return batch

    def _place(self, batch: HostBatch) -> None:
        """Fill positions and slots from the runs and their blocks."""
        if len(batch.runs) == len(batch.positions) <= _FEW:
            self._place_few(batch)
            return
        row, start, num_tokens, first = batch.runs.T
        if len(batch.runs) == len(batch.positions):  # one token each
            batch.positions[:] = start
        else:
            np.add(np.arange(len(batch.positions)), np.repeat(start - row, num_tokens), out=batch.positions)
            first = np.repeat(first, num_tokens)
        index = batch.positions // self._block_size
        place = batch.positions - index * self._block_size
        np.add(batch.blocks[:, index + first] * self._block_size, place, out=batch.slots)

    def _place_few(self, batch: HostBatch) -> None:
        """Do the same for few runs of one token each: ten calls of numpy take longer than this."""
        for number, (_, start, _, first) in enumerate(batch.runs.tolist()):
            index, place = divmod(start, self._block_size)
            batch.positions[number] = start
            for slots, blocks in zip(batch.slots, batch.blocks, strict=True):
                slots[number] = blocks[first + index] * self._block_size + place

    def _next_buffer(self, size: int) -> Integers:
        self._buffers.reverse()
        if len(self._buffers[0]) < size:
            self._buffers[0] = self._new_buffer(2 * size)
        return self._buffers[0]

    def _new_buffer(self, size: int) -> Integers:
        if not self._is_pinned:
            return np.empty(size, np.int64)
        pinned: Integers = torch.empty(size, dtype=torch.int64, pin_memory=True).numpy()
        return pinned
