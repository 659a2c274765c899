"""SDPA attention agrees with the torch ops. On a CPU here; the code is the same on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from tandem_engine.ops import sdpa_plan
from tandem_engine.ops.base import KVPool, Ops, Run, Step
from tandem_engine.ops.sdpa_ops import SdpaOps
from tandem_engine.ops.torch_ops import TorchOps
from tests.tandem_engine.steps import step_of

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 8
POOL = KVPool(torch.empty(0, 0), 2, KV_HEADS, DIM, BLOCK)
MIXED = ((0, 21), (20, 1), (13, 9))  # a whole prompt, a decode, a later chunk: (start, num_tokens)
DECODES = tuple((start, 1) for start in (0, 3, 39, 7, 8, 38, 150, 21))


def _step(ops: Ops, bounds: Sequence[tuple[int, int]]) -> Step:
    """Return a step of runs; no two share a block, and blocks of a run are not in order."""
    runs, row = [], 0
    for index, (start, num_tokens) in enumerate(bounds):
        num_blocks = -(-(start + num_tokens) // BLOCK)
        runs.append(Run(row, start, num_tokens, torch.arange(num_blocks).flip(0) * len(bounds) + index))
        row += num_tokens
    positions = torch.cat([torch.arange(run.start, run.start + run.num_tokens) for run in runs])
    slots = [run.blocks[torch.arange(run.start, run.start + run.num_tokens) // BLOCK] for run in runs]
    return step_of(ops, positions, torch.cat(slots) * BLOCK + positions % BLOCK, runs)


def _attended(ops: Ops, bounds: Sequence[tuple[int, int]], window: int | None, softcap: float | None) -> torch.Tensor:
    """Attend after the runs' keys and values were written as whole prompts, into memory full of NaN."""
    torch.manual_seed(6)
    pool = KVPool(torch.full((180, 2 * 2 * KV_HEADS * DIM * BLOCK), torch.nan), 2, KV_HEADS, DIM, BLOCK)
    prompts = _step(ops, [(0, start + num_tokens) for start, num_tokens in bounds])
    key, value = torch.randn(2, len(prompts.positions), KV_HEADS, DIM)
    ops.kv_write(key, value, prompts, pool, 1)
    step = _step(ops, bounds)
    query = torch.randn(len(step.positions), HEADS * DIM)
    return ops.paged_attention(query, HEADS, step, pool, 1, scale=0.3, window=window, softcap=softcap)


@pytest.mark.parametrize("bounds", [MIXED, DECODES, DECODES[:1]])
@pytest.mark.parametrize("window", [None, 5, 13])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_sdpa_agrees_with_the_torch_ops(
    bounds: Sequence[tuple[int, int]], window: int | None, softcap: float | None
) -> None:
    ours, theirs = (_attended(ops, bounds, window, softcap) for ops in (SdpaOps(), TorchOps()))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_call_of_decodes_is_cut_where_it_would_gather_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [call.num_runs for call in _plan_of(DECODES).decodes] == [8]
    expected = _attended(SdpaOps(), DECODES, None, None)
    monkeypatch.setattr(sdpa_plan, "MAX_GATHERED_TOKENS", 400)
    monkeypatch.setattr(sdpa_plan, "_SHORT_TOKENS", 8)
    # blocks of each: 1 1 5 1 2 5 19 3; by octave: 1, 2, up to 4, up to 8, up to 32
    assert [call.num_runs for call in _plan_of(DECODES).decodes] == [3, 1, 1, 2, 1]
    torch.testing.assert_close(_attended(SdpaOps(), DECODES, None, None), expected, atol=1e-6, rtol=1e-5)
    monkeypatch.setattr(sdpa_plan, "MAX_GATHERED_TOKENS", 8)
    assert [call.num_runs for call in _plan_of(DECODES).decodes] == [1] * 8


def _plan_of(bounds: Sequence[tuple[int, int]]) -> sdpa_plan.Plan:
    step = _step(SdpaOps(), bounds)
    assert isinstance(step, sdpa_plan.SdpaStep)
    return step.plan(None, POOL)


def test_equal_contexts_need_no_mask() -> None:
    assert [call.bias for call in _plan_of([(12, 1), (12, 1), (12, 1)]).decodes] == [None]
    assert [call.bias is None for call in _plan_of([(12, 1), (11, 1)]).decodes] == [False]


def test_a_chunk_whose_context_ends_before_its_window_is_causal() -> None:
    step = _step(SdpaOps(), [(0, 9), (9, 30)])
    assert isinstance(step, sdpa_plan.SdpaStep)
    for window, windows in ((None, [None, None]), (39, [None, None]), (38, [None, 38]), (8, [8, 8])):
        assert [chunk.window for chunk in step.plan(window, POOL).chunks] == windows
    assert [chunk.is_square for chunk in step.plan(None, POOL).chunks] == [True, False]


def test_a_kernel_that_lays_its_result_out_otherwise_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _attended(SdpaOps(), MIXED[:2], None, None)
    attend = functional.scaled_dot_product_attention

    def transposed(*arguments: Any, **options: Any) -> torch.Tensor:
        return attend(*arguments, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", transposed)
    assert torch.equal(_attended(SdpaOps(), MIXED[:2], None, None), expected)
