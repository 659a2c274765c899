"""Paged attention in torch sees the right keys and gives the same bits for every cut of a prompt."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tandem_engine.ops.base import KVPool, QKNorm, Rotary, Run
from tandem_engine.ops.torch_ops import TorchOps
from tests.tandem_engine.steps import step_of

NUM_LAYERS, LAYER = 3, 1
NO_WINDOW: dict[str, Any] = {"window": None, "softcap": None}
VARIANTS: list[dict[str, Any]] = [
    NO_WINDOW, {"window": 7, "softcap": None}, {"window": 600, "softcap": 20.0}, {"window": None, "softcap": 5.0},
]  # fmt: skip


@dataclass
class AttentionFixture:
    """A few requests' queries, keys and values, and a pool with contents of other requests."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        torch.manual_seed(8)
        total, columns = sum(self.lengths), self.num_heads + 2 * self.num_kv_heads
        self.qkv = torch.randn(total, columns * self.head_dim)
        self.ops = TorchOps()
        counts = [-(-length // self.block_size) for length in self.lengths]
        order = torch.randperm(sum(counts) + 3)
        self.tables = list(order[: sum(counts)].split(counts))
        elements = NUM_LAYERS * 2 * self.num_kv_heads * self.head_dim * self.block_size
        rubbish = torch.full((len(order), elements), math.nan)
        self.pool = KVPool(rubbish, NUM_LAYERS, self.num_kv_heads, self.head_dim, self.block_size)
        self.first_rows = [0, *itertools.accumulate(self.lengths)]

    def attend(self, chunks: list[list[tuple[int, int, int]]], **call: Any) -> torch.Tensor:
        """Run steps of (request, start, end) and return every token's result, in the requests' order."""
        result = torch.empty(len(self.qkv), self.num_heads * self.head_dim)
        for step_runs in chunks:
            rows: list[torch.Tensor] = []
            slots: list[torch.Tensor] = []
            positions: list[torch.Tensor] = []
            runs: list[Run] = []
            for request, start, end in step_runs:
                place = torch.arange(start, end)
                blocks = self.tables[request][: -(-end // self.block_size)]
                runs.append(Run(sum(len(p) for p in positions), start, end - start, blocks))
                positions.append(place)
                slots.append(blocks[place // self.block_size] * self.block_size + place % self.block_size)
                rows.append(self.first_rows[request] + place)
            step = step_of(self.ops, torch.cat(positions), torch.cat(slots), runs)
            qkv = self.qkv[torch.cat(rows)].clone()
            query = self.ops.rope_and_kv_write(qkv, self.num_heads, step, self.pool, LAYER, None)
            result[torch.cat(rows)] = self.ops.paged_attention(
                query, self.num_heads, step, self.pool, LAYER, scale=self.head_dim**-0.5, **call
            )
        return result

    def dense(self, window: int | None, softcap: float | None) -> torch.Tensor:
        """Return the same by the textbook formula in float64."""
        results = []
        for request, length in enumerate(self.lengths):
            rows = (
                self.qkv[self.first_rows[request] :][:length].double().view(length, -1, self.head_dim).transpose(0, 1)
            )
            query, key, value = rows.split((self.num_heads, self.num_kv_heads, self.num_kv_heads))
            group = self.num_heads // self.num_kv_heads
            scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) * self.head_dim**-0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
            hidden = (distance < 0) | (distance >= (window or length + 1))
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            results.append((weights @ value.repeat_interleave(group, 0)).transpose(0, 1).flatten(1))
        return torch.cat(results)


def _whole(lengths: tuple[int, ...]) -> list[list[tuple[int, int, int]]]:
    return [[(request, 0, length) for request, length in enumerate(lengths)]]


def _cut(lengths: tuple[int, ...], seed: int) -> list[list[tuple[int, int, int]]]:
    """Return steps that advance random requests by random runs, now and then a single token, until all are done."""
    generator = torch.Generator().manual_seed(seed)
    done = [0] * len(lengths)
    steps = []
    while any(place < length for place, length in zip(done, lengths, strict=True)):
        step = []
        for request, length in enumerate(lengths):
            draw = int(torch.randint(0, 60, (1,), generator=generator))
            end = min(length, done[request] + (1 if draw < 15 else 4 * draw))
            if end > done[request] and draw % 5:
                step.append((request, done[request], end))
                done[request] = end
        if step:
            steps.append(step)
    return steps


@pytest.mark.parametrize("call", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(4, 2, 16, 16), (20, 4, 64, 16), (3, 3, 40, 5), (8, 1, 24, 64)],
)
def test_attention_is_dense_attention_and_does_not_depend_on_chunks_or_neighbours(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, call: dict[str, Any]
) -> None:
    lengths = (1, 40, 700)
    fixture = AttentionFixture(num_heads, num_kv_heads, head_dim, block_size, lengths)
    whole = fixture.attend(_whole(lengths), **call)
    torch.testing.assert_close(whole.double(), fixture.dense(**call), rtol=1e-4, atol=1e-5)
    for seed in (1, 2):
        assert torch.equal(fixture.attend(_cut(lengths, seed), **call), whole)


def test_a_bf16_pool_holds_rounded_keys_and_values_and_nothing_else_is_rounded() -> None:
    lengths = (40, 300)
    fixture = AttentionFixture(4, 2, 16, 16, lengths)
    fixture.pool = replace(fixture.pool, rows=fixture.pool.rows.bfloat16())
    whole = fixture.attend(_whole(lengths), **NO_WINDOW)
    assert torch.equal(fixture.attend(_cut(lengths, 4), **NO_WINDOW), whole)
    fixture.qkv[:, 4 * 16 :] = fixture.qkv[:, 4 * 16 :].bfloat16().float()
    torch.testing.assert_close(whole.double(), fixture.dense(**NO_WINDOW), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_attention_does_not_depend_on_threads(num_threads: int) -> None:
    lengths = (100, 530)
    fixture = AttentionFixture(6, 2, 64, 16, lengths)
    whole = fixture.attend(_whole(lengths), **NO_WINDOW)
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(fixture.attend(_cut(lengths, 3), **NO_WINDOW), whole)
    finally:
        torch.set_num_threads(1)


def test_blocks_behind_a_window_are_not_read() -> None:
    lengths = (200,)
    fixture = AttentionFixture(4, 2, 16, 16, lengths)
    call = {"window": 20, "softcap": None}
    whole = fixture.attend(_whole(lengths), **call)
    fixture.attend([[(0, 0, 199)]], **call)
    fixture.pool.rows[fixture.tables[0][: (199 - 20 + 1) // 16]] = math.nan
    fixture.tables[0] = fixture.tables[0].clone()
    fixture.tables[0][: (199 - 20 + 1) // 16] = 10_000  # no such block
    assert torch.equal(fixture.attend([[(0, 199, 200)]], **call)[-1], whole[-1])


def test_heads_are_normed_then_turned_and_the_last_dimensions_stay() -> None:
    torch.manual_seed(9)
    num_heads, num_kv_heads, head_dim, block_size, half = 4, 2, 16, 4, 5
    ops = TorchOps()
    pool = KVPool(
        torch.zeros(3, NUM_LAYERS * 2 * num_kv_heads * head_dim * block_size), NUM_LAYERS, num_kv_heads, head_dim, 4
    )
    angles = torch.rand(50, half)
    rotary = Rotary(angles.cos(), angles.sin())
    norm = QKNorm(torch.rand(head_dim), torch.rand(head_dim), 1e-6)
    positions, slots = torch.tensor([7, 33, 8]), torch.tensor([9, 0, 3])
    qkv = torch.randn(3, (num_heads + 2 * num_kv_heads) * head_dim)
    heads = qkv.clone().view(3, -1, head_dim)
    query = ops.rope_and_kv_write(qkv, num_heads, step_of(ops, positions, slots, []), pool, LAYER, rotary, norm)

    def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.rms_norm(x, (head_dim,), weight, 1e-6)
        turned = torch.view_as_complex(torch.stack((x[..., :half], x[..., half : 2 * half]), -1))
        turned = torch.view_as_real(turned * torch.polar(torch.ones(3, half), angles[positions]).unsqueeze(1))
        return torch.cat((turned[..., 0], turned[..., 1], x[..., 2 * half :]), -1)

    torch.testing.assert_close(query.view(3, num_heads, head_dim), expected(heads[:, :num_heads], norm.query))
    of_layer = pool.rows.view(3, NUM_LAYERS, 2, num_kv_heads, head_dim * block_size)[:, LAYER]
    keys = of_layer[:, 0].view(3, num_kv_heads, head_dim, block_size)[slots // 4, :, :, slots % 4]
    values = of_layer[:, 1].view(3, num_kv_heads, block_size, head_dim)[slots // 4, :, slots % 4]
    torch.testing.assert_close(keys, expected(heads[:, num_heads : num_heads + num_kv_heads], norm.key))
    assert torch.equal(values, heads[:, num_heads + num_kv_heads :])
    others = pool.rows.view(3, NUM_LAYERS, -1)[:, [0, 2]]
    assert not others.any(), "another layer was written"
