"""Norms, gates, rotations and KV writes are right, and their bits do not depend on what is computed beside them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tandem_engine.ops.base import Activation, KVPool, QKNorm, Rotary
from tests.tandem_engine.ops.cpu_machines import FLAGS, cpu_ops, has_fma
from tests.tandem_engine.ops.wheel_kernels import wheel_ops
from tests.tandem_engine.steps import step_of

SIZES = [1, 15, 16, 31, 64, 100, 1280]


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("machine", FLAGS)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(machine: str, size: int) -> None:
    ops = cpu_ops(machine)
    x, weight = torch.randn(70, size + 5)[:, 3 : size + 3], torch.randn(size)
    y = ops.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(y.double(), _normed(x, weight, 1e-5), atol=1e-6, rtol=1e-6)
    assert torch.equal(torch.cat([ops.rms_norm(row.unsqueeze(0), weight, 1e-5) for row in x]), y)


@pytest.mark.parametrize("machine", FLAGS)
@pytest.mark.parametrize("size", SIZES)
def test_adding_before_a_norm_gives_the_bits_of_one_after_the_other(machine: str, size: int) -> None:
    ops = cpu_ops(machine)
    x, weight = torch.randn(70, size + 5)[:, 3 : size + 3], torch.randn(size)
    more = torch.randn(size, 70).t()
    total = x + more
    y = ops.add_rms_norm(x, more, weight, 1e-5)
    assert torch.equal(x, total)
    assert torch.equal(y, ops.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("machine", FLAGS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", SIZES)
def test_gates(machine: str, activation: Activation, size: int) -> None:
    ops = cpu_ops(machine)
    x = torch.randn(70, 2 * size) * 5
    x[0, 0], x[1, 0] = 200.0, -200.0  # e^200 is beyond a float
    gate, up = x.double().chunk(2, -1)
    expected = (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up
    y = ops.gated(x, activation)
    torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=2e-6)
    assert torch.equal(torch.cat([ops.gated(row.unsqueeze(0), activation) for row in x]), y)


def test_machines_that_fuse_products_agree_on_every_bit() -> None:
    if not has_fma():
        pytest.skip("this machine does not fuse products")
    native = cpu_ops()
    x, weight = torch.randn(9, 100), torch.randn(100)
    for other in (cpu_ops("avx2"), *wheel_ops()):
        assert torch.equal(native.rms_norm(x, weight, 1e-6), other.rms_norm(x, weight, 1e-6))
        assert torch.equal(native.gated(x, "silu"), other.gated(x, "silu"))
        assert torch.equal(native.gated(x, "gelu_tanh"), other.gated(x, "gelu_tanh"))


@pytest.mark.parametrize("machine", FLAGS)
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("rotary_dim", [0, 16, 80])
@pytest.mark.parametrize("is_normed", [False, True])
def test_queries_and_keys_turn_and_land_in_their_slots(
    machine: str, block_size: int, rotary_dim: int, is_normed: bool
) -> None:
    ops = cpu_ops(machine)
    num_heads, num_kv_heads, dim, num_tokens = 6, 2, 80, 37
    pool = KVPool(torch.randn(12, 2 * 2 * num_kv_heads * dim * block_size), 2, num_kv_heads, dim, block_size)
    before = pool.rows.clone()
    positions = torch.randperm(200)[:num_tokens]
    slots = torch.randperm(12 * block_size)[:num_tokens]
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * dim)
    angles = torch.rand(200, rotary_dim // 2) * 6
    rotary = Rotary(angles.cos(), angles.sin()) if rotary_dim else None
    norm = QKNorm(torch.randn(dim), torch.randn(dim), 1e-5) if is_normed else None
    query, key, value = qkv.clone().view(num_tokens, -1, dim).split((num_heads, num_kv_heads, num_kv_heads), 1)
    if norm is not None:
        query, key = _normed(query, norm.query, 1e-5), _normed(key, norm.key, 1e-5)
    if rotary is not None:
        query, key = _turned(query, rotary, positions), _turned(key, rotary, positions)

    got = ops.rope_and_kv_write(qkv, num_heads, step_of(ops, positions, slots, []), pool, 1, rotary, norm)

    torch.testing.assert_close(got.double(), query.double().flatten(1), atol=3e-6, rtol=1e-5)
    keys, values = _layer(pool, 1)
    for token, slot in enumerate(slots.tolist()):
        block, place = divmod(slot, block_size)
        torch.testing.assert_close(keys[block, :, :, place].double(), key[token].double(), atol=3e-6, rtol=1e-5)
        assert torch.equal(values[block, :, place], value[token])
    untouched = torch.ones(12 * block_size, dtype=torch.bool)
    untouched[slots] = False
    was_keys, was_values = _layer(KVPool(before, 2, num_kv_heads, dim, block_size), 1)
    for slot in untouched.nonzero().flatten().tolist():
        block, place = divmod(slot, block_size)
        assert torch.equal(keys[block, :, :, place], was_keys[block, :, :, place])
        assert torch.equal(values[block, :, place], was_values[block, :, place])
    half = pool.elements_per_layer
    assert torch.equal(pool.rows[:, :half], before[:, :half]), "the other layer was written"


def test_keys_of_any_strides_are_written() -> None:
    ops = cpu_ops()
    block_size, num_tokens = 16, 21
    rows = torch.zeros(4, 2 * 3 * 24 * block_size)
    pools = [KVPool(rows.clone(), 1, 3, 24, block_size) for _ in range(2)]
    key, value = torch.randn(3, num_tokens, 24), torch.randn(num_tokens, 3, 24)
    step = step_of(ops, torch.arange(num_tokens), torch.randperm(64)[:num_tokens], [])
    ops.kv_write(key.transpose(0, 1), value, step, pools[0], 0)
    ops.kv_write(
        key.transpose(0, 1).contiguous(), value.permute(2, 0, 1).contiguous().permute(1, 2, 0), step, pools[1], 0
    )
    assert torch.equal(pools[0].rows, pools[1].rows)
    keys, values = _layer(pools[0], 0)
    for token, slot in enumerate(step.slots.tolist()):
        assert torch.equal(keys[slot // 16, :, :, slot % 16], key[:, token])
        assert torch.equal(values[slot // 16, :, slot % 16], value[token])


def test_a_pool_of_another_dtype_is_refused() -> None:
    ops = cpu_ops()
    pool = KVPool(torch.zeros(4, 2 * 16 * 16, dtype=torch.bfloat16), 1, 1, 16, 16)
    step = step_of(ops, torch.arange(1), torch.arange(1), [])
    with pytest.raises(ValueError, match="bfloat16"):
        ops.kv_write(torch.zeros(1, 1, 16), torch.zeros(1, 1, 16), step, pool, 0)


def _layer(pool: KVPool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [num_blocks, num_kv_heads, head_dim, block_size] and values [.., block_size, head_dim]."""
    both = pool.rows.view(len(pool.rows), pool.num_layers, 2, pool.num_kv_heads, -1)[:, layer]
    shape = (pool.head_dim, pool.block_size)
    return both[:, 0].unflatten(-1, shape), both[:, 1].unflatten(-1, shape[::-1])


def _turned(x: torch.Tensor, rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = (table[positions].unsqueeze(1).double() for table in (rotary.cos, rotary.sin))
    half = cos.shape[-1]
    a, b, rest = x.double().split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
