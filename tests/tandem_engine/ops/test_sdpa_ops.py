"""SDPA attention agrees with the torch ops. On a CPU here; the code is the same on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tandem_engine.ops.base import KVPool, Ops, Run
from tandem_engine.ops.sdpa_ops import SdpaOps
from tandem_engine.ops.torch_ops import TorchOps
from tests.tandem_engine.steps import step_of

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 8
LENGTHS = ((0, 21), (20, 1), (13, 9))  # a whole prompt, a decode, a later chunk: (start, num_tokens)


def _attended(ops: Ops, window: int | None, softcap: float | None) -> torch.Tensor:
    torch.manual_seed(6)
    rows = torch.randn(12, 2 * KV_HEADS * DIM * BLOCK)
    pool = KVPool(rows, 1, KV_HEADS, DIM, BLOCK)
    runs, row = [], 0
    for index, (start, num_tokens) in enumerate(LENGTHS):
        runs.append(Run(row, start, num_tokens, torch.arange(3) * 3 + index))
        row += num_tokens
    positions = torch.cat([torch.arange(run.start, run.start + run.num_tokens) for run in runs])
    query = torch.randn(row, HEADS * DIM)
    step = step_of(ops, positions, torch.zeros_like(positions), runs)
    return ops.paged_attention(query, HEADS, step, pool, 0, scale=0.3, window=window, softcap=softcap)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_sdpa_agrees_with_the_torch_ops(window: int | None, softcap: float | None) -> None:
    torch.testing.assert_close(
        _attended(SdpaOps(), window, softcap), _attended(TorchOps(), window, softcap), atol=1e-5, rtol=1e-4
    )


def test_a_kernel_that_lays_its_result_out_otherwise_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _attended(SdpaOps(), None, None)
    attend = functional.scaled_dot_product_attention

    def transposed(*arguments: Any, **options: Any) -> torch.Tensor:
        return attend(*arguments, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", transposed)
    assert torch.equal(_attended(SdpaOps(), None, None), expected)
