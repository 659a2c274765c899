"""Builds the input tensors of one step's forward pass.

All runs of a step are concatenated in one flat token dimension. The rows that sample are a run's last known token and
the drafts behind it.

    token_ids      run 0: t0 t1 t2 | run 1: t9 d d | run 2: t0 t1 ...
    positions               0  1  2 |         9 10 11 |       0  1
    slots          block * block_size + offset of each

If layers are in several groups, each group has its own block tables and slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tandem_engine.ops.base import Ops, Run, Step
from tandem_engine.scheduling.batch import ScheduledRun


@dataclass(frozen=True)
class InputBatch:
    """The tensors of one step, on the model's device."""

    token_ids: torch.Tensor
    """[num_tokens], int64."""
    sample_rows: torch.Tensor
    """[num_sampled], int64: indices into the token dimension, in the runs' order. Each run that samples has its last
    known token and its drafts here."""
    step: Step


def build_input_batch(runs: Sequence[ScheduledRun], block_size: int, device: torch.device, ops: Ops) -> InputBatch:
    """Build the tensors of runs; every block that they write must be in their block tables."""
    token_ids: list[int] = []
    sample_rows: list[int] = []
    positions = []
    placed: list[list[Run]] = [[] for _ in runs[0].request.tables]  # by group
    slots: list[list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = [[] for _ in placed]
    for run in runs:
        start, end = run.first_position, run.end + len(run.draft_tokens)
        run_positions = np.arange(start, end)
        indices, offsets = run_positions // block_size, run_positions % block_size
        for group in range(len(placed)):
            blocks = _blocks(run, group, -(-end // block_size))
            placed[group].append(Run(len(token_ids), start, end - start, torch.from_numpy(blocks).to(device)))
            slots[group].append(blocks[indices] * block_size + offsets)
        token_ids += run.request.token_ids[start : run.end]
        token_ids += run.draft_tokens
        positions.append(run_positions)
        if run.samples:
            sample_rows += range(len(token_ids) - 1 - len(run.draft_tokens), len(token_ids))
    all_positions = torch.from_numpy(np.concatenate(positions)).to(device)
    steps = [
        ops.step(all_positions, torch.from_numpy(np.concatenate(of_group)).to(device), of_runs)
        for of_group, of_runs in zip(slots, placed, strict=True)
    ]
    return InputBatch(
        token_ids=torch.tensor(token_ids, device=device),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        step=replace(steps[0], groups=steps) if len(steps) > 1 else steps[0],
    )


def _blocks(run: ScheduledRun, group: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the block table up to `end`; nothing reads the entries of dropped blocks."""
    if not group:
        return np.array(run.request.block_table[:end], np.int64)
    first = run.request.num_dropped_blocks
    blocks = np.zeros(end, np.int64)
    blocks[first:] = run.request.window_tables[group - 1][first:end]
    return blocks
