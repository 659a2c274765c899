"""All layers in one op give the bits of their ops one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem_engine.models.lean.decoder import Decoder
from tandem_engine.ops.base import KVPool, LayerParts, Run
from tandem_engine.ops.cpu import CpuOps
from tandem_engine.ops.cpu.layers import CpuLayers
from tandem_engine.ops.cpu.library import load_library
from tests.tandem_engine.models.lean.kinds import CONFIGS, VOCAB_SIZE
from tests.tandem_engine.models.lean.runner import Runner, cut
from tests.tandem_engine.ops.cpu_machines import FLAGS, cpu_ops
from tests.tandem_engine.steps import step_of

MIXTURES = ("mixtral", "qwen3-moe", "qwen3-moe-sparse")
LENGTHS = (1, 130, 33, 240)
"""The two long ones have more rows than layers take at a time."""


class OneByOne(CpuOps):
    def layers(self, layers: Sequence[LayerParts]) -> None:
        return None


class Watched(CpuOps):
    """Records whether layers ran at once."""

    made: CpuLayers | None = None

    def layers(self, layers: Sequence[LayerParts]) -> CpuLayers | None:
        self.made = super().layers(layers)
        return self.made


def _ops(kind: type[CpuOps], machine: str = "native", num_threads: int = 1) -> CpuOps:
    cpu_ops(machine)  # else skips the test
    ops = kind(load_library(machine_flags=FLAGS[machine]))
    ops.set_num_threads(num_threads)
    return ops


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]


def _runner(decoder: Decoder) -> Runner:
    runner = Runner(decoder)
    for prompt in _prompts():
        runner.add(prompt)
    return runner


def _everything(decoder: Decoder) -> list[torch.Tensor]:
    """Return logits and caches of prompts whole, in pieces and again, and of some last tokens."""
    whole, pieces = _runner(decoder), _runner(decoder)
    logits = whole.step([(request, 0, length) for request, length in enumerate(LENGTHS)])
    again = whole.step([(2, 0, 33), (3, 0, 240)], last_only=True)
    last = whole.step([(1, 129, 130), (3, 200, 240), (2, 32, 33)], last_only=True)
    return [logits, again, last, *pieces.logits(cut(LENGTHS, seed=3)), whole.pool.rows, pieces.pool.rows]


@pytest.mark.parametrize("machine", FLAGS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_prompts_whole_and_cut_and_decodes_have_the_bits_of_op_by_op(
    kind: str, machine: str, make_kind: Callable[..., Path], load_folder: Callable[..., Decoder]
) -> None:
    at_once = _ops(Watched, machine, num_threads=2)
    results = [_everything(load_folder(make_kind(kind), ops)) for ops in (at_once, _ops(OneByOne, machine))]
    assert isinstance(at_once, Watched) and (at_once.made is None) == (kind in MIXTURES)
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_many_threads_which_take_more_rows_at_a_time_give_the_same_bits(
    make_kind: Callable[..., Path], load_folder: Callable[..., Decoder]
) -> None:
    folder = make_kind("gemma2")
    results = [_everything(load_folder(folder, _ops(CpuOps, num_threads=threads))) for threads in (8, 1)]
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2"])
def test_layers_in_groups_of_their_own_write_and_read_their_own_blocks(
    kind: str, make_kind: Callable[..., Path], load_folder: Callable[..., Decoder]
) -> None:
    num_tokens, num_blocks = 150, 10
    results = []
    for ops in (_ops(CpuOps), _ops(OneByOne)):
        decoder = load_folder(make_kind(kind), ops)
        config = decoder.config
        tables = torch.randperm(3 * num_blocks, generator=torch.Generator().manual_seed(2)).view(3, num_blocks)
        rows = torch.zeros(3 * num_blocks, 2 * config.num_kv_heads * config.head_dim * 16)
        pool = KVPool(rows, 1, config.num_kv_heads, config.head_dim, 16, places=[(1, 0), (0, 0), (2, 0)])
        token_ids, logits = torch.tensor(_prompts()[3][:num_tokens]), []
        for start, end in ((0, 140), (140, 149), (149, 150)):
            place = torch.arange(start, end)
            steps = [
                step_of(ops, place, table[place // 16] * 16 + place % 16, [Run(0, start, end - start, table)])
                for table in tables
            ]
            step = replace(steps[0], groups=steps)
            with torch.inference_mode():
                logits.append(decoder.forward(token_ids[start:end], step, pool, torch.tensor([end - start - 1])))
        results.append([*logits, rows])
    assert all(block.any() for block in results[0][-1])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind_of_ops", [CpuOps, OneByOne])
def test_what_is_done_once_keys_and_values_are_written_comes_before_the_last_attention(
    kind_of_ops: type[CpuOps], make_kind: Callable[..., Path], load_folder: Callable[..., Decoder]
) -> None:
    decoder = load_folder(make_kind("llama3"), _ops(kind_of_ops))
    plain, changed = _runner(decoder), _runner(decoder)
    written: list[torch.Tensor] = []

    def change() -> None:
        written.append(changed.pool.rows.clone())
        changed.pool.rows[:, -changed.pool.elements_per_layer :] = 0

    expected = plain.step([(1, 0, 130)], last_only=True)
    logits = changed.step([(1, 0, 130)], last_only=True, kv_written=change)
    (rows,) = written
    assert torch.equal(rows, plain.pool.rows) and not torch.equal(logits, expected)


def test_an_error_once_keys_and_values_are_written_reaches_the_caller(
    make_kind: Callable[..., Path], load_folder: Callable[..., Decoder]
) -> None:
    runner = _runner(load_folder(make_kind("llama3"), _ops(CpuOps)))

    def fail() -> None:
        raise RuntimeError("the reader is gone")

    with pytest.raises(RuntimeError, match="the reader is gone"):
        runner.step([(1, 0, 130)], kv_written=fail)
