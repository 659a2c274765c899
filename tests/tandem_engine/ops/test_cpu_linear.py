"""A linear layer's row is right, and its bits do not depend on what is computed beside it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tandem_engine.ops.cpu.weight import CpuWeight
from tests.tandem_engine.ops.cpu_machines import FLAGS, cpu_ops, has_fma
from tests.tandem_engine.ops.wheel_kernels import wheel_ops

SHAPES = [(1, 1), (17, 33), (64, 32), (96, 100), (130, 31), (1300, 200), (2600, 70)]
"""(in_features, out_features) of weights; the last two are multiplied in two and three parts."""


def _inputs(num_tokens: int, in_features: int, out_features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_tokens * 7 + in_features)
    weight = torch.randn(out_features, in_features) / in_features**0.5
    return torch.randn(num_tokens, in_features), weight, torch.randn(out_features)


@pytest.mark.parametrize("machine", FLAGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_right(machine: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    ops = cpu_ops(machine)
    for num_tokens in (1, 2, 5, 14, 15, 29, 113, 230):
        x, weight, bias = _inputs(num_tokens, *shape)
        stored = weight.to(dtype)
        y = ops.linear(x, ops.pack(stored, bias))
        expected = functional.linear(x.double(), stored.double(), bias.double())
        assert y.shape == expected.shape
        torch.testing.assert_close(y.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("machine", FLAGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_others(machine: str, dtype: torch.dtype) -> None:
    ops = cpu_ops(machine)
    for in_features, out_features in ((96, 100), (2600, 70)):
        x, weight, bias = _inputs(240, in_features, out_features)
        packed = ops.pack(weight.to(dtype), bias)
        alone = torch.cat([ops.linear(row.unsqueeze(0), packed) for row in x])
        for num_tokens in (*range(1, 71), 112, 113, 224, 240):
            assert torch.equal(ops.linear(x[:num_tokens], packed), alone[:num_tokens]), f"{num_tokens} rows"
            assert torch.equal(ops.linear(x[-num_tokens:], packed), alone[-num_tokens:]), f"the last {num_tokens} rows"


def test_threads_change_no_bits() -> None:
    ops = cpu_ops()
    x, weight, bias = _inputs(150, 1300, 700)
    packed = ops.pack(weight, bias)
    results = []
    for num_threads in (1, 2, 3, 1):
        ops.set_num_threads(num_threads)
        results.append([ops.linear(x[:n], packed) for n in (1, 3, 33, 150)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_bf16_weights_give_the_bits_of_the_same_weights_in_fp32() -> None:
    ops = cpu_ops()
    x, weight, bias = _inputs(40, 1300, 200)
    half = weight.bfloat16()
    for num_tokens in (1, 7, 40):
        rows = x[:num_tokens]
        assert torch.equal(ops.linear(rows, ops.pack(half, bias)), ops.linear(rows, ops.pack(half.float(), bias)))


def test_machines_that_fuse_products_agree_on_every_bit() -> None:
    if not has_fma():
        pytest.skip("this machine does not fuse products")
    native = cpu_ops()
    x, weight, bias = _inputs(31, 1300, 200)
    for other in (cpu_ops("avx2"), *wheel_ops()):
        assert native.name == other.name
        for stored in (weight, weight.bfloat16()):
            assert torch.equal(native.linear(x, native.pack(stored, bias)), other.linear(x, other.pack(stored, bias)))


def test_rows_may_lie_apart() -> None:
    ops = cpu_ops()
    x, weight, _ = _inputs(9, 96, 100)
    wide = torch.randn(9, 300)
    wide[:, 50:146] = x
    packed = ops.pack(weight)
    assert torch.equal(ops.linear(wide[:, 50:146], packed), ops.linear(x, packed))
    assert torch.equal(ops.linear(wide.t().contiguous().t()[:, 50:146], packed), ops.linear(x, packed))


def test_no_tokens_make_no_rows() -> None:
    ops = cpu_ops()
    assert ops.linear(torch.empty(0, 96), ops.pack(torch.randn(100, 96))).shape == (0, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_loses_nothing(shape: tuple[int, int], dtype: torch.dtype) -> None:
    ops = cpu_ops()
    weight = torch.randn(shape[1], shape[0]).to(dtype)
    packed = ops.pack(weight)
    assert torch.equal(ops.unpack(packed), weight)
    assert torch.equal(ops.unpack(ops.pack(weight.t().contiguous().t())), weight)
    assert torch.equal(ops.pack(torch.cat((weight, weight), 1)[:, : shape[0]]).tiles, packed.tiles)
    kept = ops.packed(packed.in_features, packed.out_features, packed.tensors)
    assert kept.tiles.data_ptr() == packed.tiles.data_ptr()
    indices = torch.tensor([shape[1] - 1, 0, shape[1] // 2, 0])
    assert torch.equal(ops.rows(packed, indices), weight[indices].float())


def test_weights_of_other_sizes_are_refused() -> None:
    ops = cpu_ops()
    packed = ops.pack(torch.randn(100, 96))
    with pytest.raises(ValueError, match="128 outputs of 96 inputs make"):
        ops.packed(96, 129 - 1, {**packed.tensors, "tiles": packed.tiles[:3]})
    with pytest.raises(ValueError, match="float16"):
        ops.pack(torch.randn(4, 4).half())
    with pytest.raises(ValueError, match="not contiguous"):
        CpuWeight(96, 32, packed.tiles[:1].transpose(1, 2).contiguous().transpose(1, 2), packed.bias[:32])
