"""Which tensors does one step's forward pass take?

All runs of a step lie one after the other in one flat token dimension. The rows that sample are a run's last known
token and the drafts behind it.

    token_ids      run 0: t0 t1 t2 | run 1: t9 d d | run 2: t0 t1 ...
    positions               0  1  2 |         9 10 11 |       0  1
    slots          block * block_size + offset of each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.ops.base import Ops, Run, Step
from engine.scheduling.batch import ScheduledRun


@dataclass(frozen=True)
class InputBatch:
    """Tensors of one step, on the model's device."""

    token_ids: torch.Tensor
    """[num_tokens], int64."""
    sample_rows: torch.Tensor
    """[num_sampled], int64: indices into the token dimension, in the runs' order: of each run that samples its last
    known token and its drafts."""
    step: Step


def build_input_batch(runs: Sequence[ScheduledRun], block_size: int, device: torch.device, ops: Ops) -> InputBatch:
    """Lay out the runs' tokens; every block they write to must be in their block tables."""
    token_ids: list[int] = []
    sample_rows: list[int] = []
    positions, slots, placed = [], [], []
    for run in runs:
        start, end = run.first_position, run.end + len(run.draft_tokens)
        blocks = np.array(run.request.block_table[: -(-end // block_size)], np.int64)
        run_positions = np.arange(start, end)
        placed.append(Run(len(token_ids), start, end - start, torch.from_numpy(blocks).to(device)))
        token_ids += run.request.token_ids[start : run.end]
        token_ids += run.draft_tokens
        positions.append(run_positions)
        slots.append(blocks[run_positions // block_size] * block_size + run_positions % block_size)
        if run.samples:
            sample_rows += range(len(token_ids) - 1 - len(run.draft_tokens), len(token_ids))
    return InputBatch(
        token_ids=torch.tensor(token_ids, device=device),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        step=ops.step(
            torch.from_numpy(np.concatenate(positions)).to(device),
            torch.from_numpy(np.concatenate(slots)).to(device),
            placed,
        ),
    )
