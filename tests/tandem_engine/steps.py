"""Builds steps from places that a test chose itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem_engine.ops.base import HostBatch, Ops, Run, Step


def step_of(ops: Ops, positions: torch.Tensor, slots: torch.Tensor, runs: Sequence[Run]) -> Step:
    """Return the step of some runs; its token ids and its sampled rows are not set."""
    batch = HostBatch.sized(len(positions), 0, len(runs), sum(len(run.blocks) for run in runs))
    batch.token_ids[:] = 0
    batch.positions[:] = positions.numpy()
    batch.slots[0] = slots.numpy()
    first = 0
    for index, run in enumerate(runs):
        batch.runs[index] = run.row, run.start, run.num_tokens, first
        batch.blocks[0, first : first + len(run.blocks)] = run.blocks.numpy()
        first += len(run.blocks)
    return ops.step(batch)
