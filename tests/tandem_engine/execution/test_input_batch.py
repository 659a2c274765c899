"""Tests the numbers of a step: each token's place, in one buffer that the next step leaves alone."""

from __future__ import annotations

import numpy as np
import torch

from tandem_engine.execution.input_batch import BatchBuilder, Stretch
from tandem_engine.ops.torch_ops import TorchOps

_CPU = torch.device("cpu")


def test_each_token_has_its_position_its_slots_and_its_row() -> None:
    """A chunk of a prompt, an answer with two drafts, and an answer without; two groups of layers, blocks of 4."""
    batch = BatchBuilder(4, _CPU).build(
        [
            Stretch(2, [12, 13, 14], [[5, 3, 8], [6, 1]], 0),
            Stretch(7, [27, 91, 92], [[0, 2, 4], [9, 7, 11, 12]], 3),
            Stretch(4, [34], [[10, 13], [14, 15]], 1),
        ]
    )
    assert batch.token_ids.tolist() == [12, 13, 14, 27, 91, 92, 34]
    assert batch.positions.tolist() == [2, 3, 4, 7, 8, 9, 4]
    assert batch.sample_rows.tolist() == [3, 4, 5, 6]
    assert batch.slots.tolist() == [[22, 23, 12, 11, 16, 17, 52], [26, 27, 4, 31, 44, 45, 60]]
    assert batch.blocks.tolist() == [[5, 3, 0, 2, 4, 10, 13], [6, 1, 9, 7, 11, 14, 15]]
    assert batch.runs.tolist() == [[0, 2, 3, 0], [3, 7, 3, 2], [6, 4, 1, 5]]


def test_a_step_has_the_batchs_numbers_and_its_memory() -> None:
    """All arrays are in the one buffer: a device gets it in one copy, a CPU uses it as it is."""
    batch = BatchBuilder(4, _CPU).build([Stretch(2, [12, 13], [[5], [6]], 1), Stretch(7, [27], [[0, 2], [9, 7]], 1)])
    step = TorchOps().step(batch)
    assert [group.slots.tolist() for group in step.groups] == batch.slots.tolist()
    assert [[run.blocks.tolist() for run in group.runs] for group in step.groups] == [[[5], [0, 2]], [[6], [9, 7]]]
    assert [(run.row, run.start, run.num_tokens) for run in step.runs] == [(0, 2, 2), (2, 7, 1)]
    batch.buffer[:] = np.arange(len(batch.buffer))
    tensors = (step.token_ids, step.positions, step.sample_rows, step.groups[1].slots, step.groups[1].blocks)
    assert [tensor.tolist() for tensor in tensors] == [[0, 1, 2], [19, 20, 21], [3, 4], [25, 26, 27], [16, 17, 18]]


def test_few_answers_have_the_places_that_many_have() -> None:
    stretches = [Stretch(3 * number, [number], [[9, 7, 5, 3, 8, 6], [2, 0, 4, 1, 11, 10]], 1) for number in range(8)]
    many = BatchBuilder(4, _CPU).build(stretches)
    few = [BatchBuilder(4, _CPU).build([each]) for each in stretches]
    assert many.positions.tolist() == [each.positions.item() for each in few] == list(range(0, 24, 3))
    assert many.slots.T.tolist() == [each.slots[:, 0].tolist() for each in few]
    assert many.slots[:, 3].tolist() == [5 * 4 + 1, 4 * 4 + 1]


def test_a_batch_outlives_the_building_of_the_next_one() -> None:
    builder = BatchBuilder(4, _CPU)
    first = builder.build([Stretch(0, [1, 2, 3, 4, 5], [[0, 1]], 1)])
    second = builder.build([Stretch(5, [6], [[0, 1]], 1)])
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert second.token_ids.tolist() == [6]
    third = builder.build([Stretch(6, [7], [[0, 1]], 1)])
    assert second.slots.tolist() == [[5]] and third.slots.tolist() == [[6]]
    assert np.shares_memory(first.buffer, third.buffer)
