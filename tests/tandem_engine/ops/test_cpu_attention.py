"""Paged attention is right, and a token's bits do not depend on how its request was cut and batched."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from tandem_engine.ops.base import KVPool, Run
from tandem_engine.ops.cpu import CpuOps
from tests.tandem_engine.ops.cpu_machines import FLAGS, cpu_ops, has_fma
from tests.tandem_engine.ops.wheel_kernels import wheel_ops
from tests.tandem_engine.steps import step_of


@dataclass(frozen=True)
class Shape:
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Request:
    """Tokens with their queries, keys and values, [num_tokens, heads, head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def __len__(self) -> int:
        return len(self.query)


SHAPES = [
    Shape(),
    Shape(block_size=8, window=13),
    Shape(block_size=12, head_dim=16),
    Shape(block_size=32, head_dim=64),
    Shape(block_size=64, head_dim=96, softcap=3.0),
    Shape(num_heads=4, num_kv_heads=4, head_dim=80, window=100),
    Shape(num_heads=7, num_kv_heads=1, head_dim=128),
    Shape(num_heads=16, num_kv_heads=1, head_dim=256, window=600, softcap=5.0),
    Shape(num_heads=2, num_kv_heads=1, head_dim=20),
    Shape(num_heads=2, num_kv_heads=2, head_dim=7, block_size=5),
]


def _request(shape: Shape, num_tokens: int, seed: int) -> Request:
    torch.manual_seed(seed)
    kv = (num_tokens, shape.num_kv_heads, shape.head_dim)
    return Request(torch.randn(num_tokens, shape.num_heads, shape.head_dim), torch.randn(kv), torch.randn(kv))


def _expected(shape: Shape, request: Request) -> torch.Tensor:
    """Return [num_tokens, heads * head_dim], by the textbook formula in float64."""
    group = shape.num_heads // shape.num_kv_heads
    query = request.query.double().transpose(0, 1)
    key, value = (x.double().transpose(0, 1).repeat_interleave(group, 0) for x in (request.key, request.value))
    scores = query @ key.transpose(1, 2) * shape.head_dim**-0.5
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    sees = torch.ones(len(request), len(request), dtype=torch.bool).tril()
    if shape.window is not None:
        sees &= ~torch.ones_like(sees).tril(-shape.window)
    output: torch.Tensor = scores.masked_fill(~sees, -math.inf).softmax(-1) @ value
    return output.transpose(0, 1).flatten(1)


class AttentionFixture:
    """A pool full of NaN, from which requests take blocks in random order."""

    def __init__(self, ops: CpuOps, shape: Shape, num_blocks: int = 400, seed: int = 0) -> None:
        self.ops, self.shape = ops, shape
        elements = 3 * 2 * shape.num_kv_heads * shape.head_dim * shape.block_size
        self.pool = KVPool(
            torch.full((num_blocks, elements), math.nan), 3, shape.num_kv_heads, shape.head_dim, shape.block_size
        )
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self.blocks: dict[int, torch.Tensor] = {}

    def attend(self, chunks: list[tuple[Request, int, int]]) -> list[torch.Tensor]:
        """Write and attend for tokens [start, end) of each request, all in one step."""
        runs, row = [], 0
        for request, start, end in chunks:
            runs.append(Run(row, start, end - start, self._blocks_of(request, end)))
            row += end - start
        positions = torch.cat([torch.arange(start, end) for _, start, end in chunks])
        tables = torch.cat(
            [run.blocks[torch.arange(run.start, run.start + run.num_tokens) // self.shape.block_size] for run in runs]
        )
        slots = tables * self.shape.block_size + positions % self.shape.block_size
        step = step_of(self.ops, positions, slots, runs)
        query, key, value = (
            torch.cat([getattr(request, name)[start:end] for request, start, end in chunks])
            for name in ("query", "key", "value")
        )
        self.ops.kv_write(key, value, step, self.pool, 1)
        out = self.ops.paged_attention(
            query.flatten(1),
            self.shape.num_heads,
            step,
            self.pool,
            1,
            scale=self.shape.head_dim**-0.5,
            window=self.shape.window,
            softcap=self.shape.softcap,
        )
        return list(out.split([run.num_tokens for run in runs]))

    def _blocks_of(self, request: Request, end: int) -> torch.Tensor:
        num_blocks = -(-end // self.shape.block_size)
        held = self.blocks.get(id(request), torch.empty(0, dtype=torch.int64))
        more = [self.free.pop() for _ in range(num_blocks - len(held))]
        self.blocks[id(request)] = torch.cat((held, torch.tensor(more, dtype=torch.int64)))
        return self.blocks[id(request)]


@pytest.mark.parametrize("machine", FLAGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_right(machine: str, shape: Shape) -> None:
    requests = [_request(shape, num_tokens, seed=num_tokens) for num_tokens in (1, 16, 45, 530)]
    outputs = AttentionFixture(cpu_ops(machine), shape).attend([(request, 0, len(request)) for request in requests])
    for request, output in zip(requests, outputs, strict=True):
        torch.testing.assert_close(output.double(), _expected(shape, request), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("machine", FLAGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_and_batches_change_no_bits(machine: str, shape: Shape) -> None:
    ops = cpu_ops(machine)
    requests = [_request(shape, num_tokens, seed=num_tokens) for num_tokens in (3, 40, 200, 1050)]
    alone = [AttentionFixture(ops, shape, seed=7).attend([(request, 0, len(request))])[0] for request in requests]
    for seed in range(3):
        chance = random.Random(seed)
        fixture = AttentionFixture(ops, shape, seed=seed)
        done = [0] * len(requests)
        while any(d < len(r) for d, r in zip(done, requests, strict=True)):
            chosen = [i for i, r in enumerate(requests) if done[i] < len(r) and chance.random() < 0.7]
            chance.shuffle(chosen)
            ends = {i: min(len(requests[i]), done[i] + chance.choice((1, 1, 2, 17, 100, 400))) for i in chosen}
            if not chosen:
                continue
            outputs = fixture.attend([(requests[i], done[i], ends[i]) for i in chosen])
            for i, output in zip(chosen, outputs, strict=True):
                assert torch.equal(output, alone[i][done[i] : ends[i]]), f"request {i}, tokens {done[i]} to {ends[i]}"
                done[i] = ends[i]


def test_threads_and_block_sizes_change_no_bits() -> None:
    ops = cpu_ops()
    results = []
    for num_threads, block_size in ((1, 16), (2, 8), (3, 64), (2, 5), (1, 32)):
        ops.set_num_threads(num_threads)
        shape = Shape(block_size=block_size, window=300)
        requests = [_request(shape, num_tokens, seed=num_tokens) for num_tokens in (40, 700)]
        results.append(
            torch.cat(AttentionFixture(ops, shape).attend([(request, 0, len(request)) for request in requests]))
        )
    ops.set_num_threads(1)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("window", [None, 1100])
def test_threads_that_share_a_context_change_no_bits(window: int | None) -> None:
    ops, results = cpu_ops(), []
    requests = [_request(Shape(), num_tokens, seed=num_tokens) for num_tokens in (513, 3000)]
    try:
        for num_threads in (1, 2, 5, 16):
            ops.set_num_threads(num_threads)
            fixture = AttentionFixture(ops, Shape(window=window))
            fixture.attend([(request, 0, len(request) - 1) for request in requests])
            results.append(
                torch.cat(fixture.attend([(request, len(request) - 1, len(request)) for request in requests]))
            )
    finally:
        ops.set_num_threads(1)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], SHAPES[8]], ids=str)
def test_machines_that_fuse_products_agree_on_every_bit(shape: Shape) -> None:
    if not has_fma():
        pytest.skip("this machine does not fuse products")
    request = _request(shape, 600, seed=1)
    native, *others = (
        AttentionFixture(ops, shape).attend([(request, 0, 600)])[0]
        for ops in (cpu_ops(), cpu_ops("avx2"), *wheel_ops())
    )
    assert all(torch.equal(native, other) for other in others)


def test_blocks_behind_the_window_are_not_touched() -> None:
    for block_size in (8, 16):
        window = 20
        shape = Shape(block_size=block_size, window=window)
        request = _request(shape, 200, seed=3)
        fixture = AttentionFixture(cpu_ops(), shape)
        fixture.attend([(request, 0, 150)])
        blocks = fixture.blocks[id(request)]
        num_dropped = (150 - window + 1) // block_size
        fixture.pool.rows[blocks[:num_dropped]] = math.nan
        blocks[:num_dropped] = 2**40  # no block at all
        rest = fixture.attend([(request, 150, 200)])[0]
        torch.testing.assert_close(rest.double(), _expected(shape, request)[150:], atol=2e-5, rtol=2e-5)


def test_infinite_scores_of_keys_out_of_sight_do_no_harm() -> None:
    shape = Shape()
    request = _request(shape, 30, seed=4)
    expected = _expected(shape, request)
    request.key[20:] = 1e30
    output = AttentionFixture(cpu_ops(), shape).attend([(request, 0, 30)])[0]
    torch.testing.assert_close(output[:20].double(), expected[:20], atol=2e-5, rtol=2e-5)
