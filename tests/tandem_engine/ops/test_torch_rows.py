"""A row of a torch op's result depends on that row alone, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tandem_engine.ops.base import Activation
from tandem_engine.ops.rowwise import softcap_
from tandem_engine.ops.torch_ops import TorchOps

NUM_ROWS = 75
SIZES = [1, 2, 31, 32, 33, 64]


@pytest.fixture(params=[1, 2, 3], ids=lambda count: f"{count}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    try:
        yield request.param
    finally:
        torch.set_num_threads(before)


def _rows_do_not_see_each_other(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Check `compute` on slices of `x` of many sizes and places against all of it; return all of it."""
    whole = compute(x.clone())
    for size in SIZES:
        for first in (0, 5, len(x) - size):
            part = compute(x[first : first + size].clone())
            assert torch.equal(part, whole[first : first + size]), f"{size} rows from {first}"
    return whole


@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (100, 77), (1280, 4100), (3000, 640)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_does_not_depend_on_the_others(
    in_features: int, out_features: int, dtype: torch.dtype, threads: int
) -> None:
    torch.manual_seed(1)
    ops = TorchOps()
    matrix, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features)
    weight = ops.pack(matrix, bias)
    x = torch.randn(NUM_ROWS, in_features)
    whole = _rows_do_not_see_each_other(lambda rows: ops.linear(rows, weight), x)
    torch.testing.assert_close(whole, x @ matrix.float().t() + bias, rtol=1e-4, atol=1e-3)


def test_a_bf16_weight_gives_the_bits_of_float32_arithmetic_on_it_widened() -> None:
    torch.manual_seed(2)
    ops = TorchOps()
    matrix = torch.randn(5000, 96).bfloat16()
    x = torch.randn(9, 96)
    assert torch.equal(ops.linear(x, ops.pack(matrix)), ops.linear(x, ops.pack(matrix.float())))


def test_rows_that_lie_apart_count_as_if_they_lay_together() -> None:
    torch.manual_seed(3)
    ops = TorchOps()
    weight = ops.pack(torch.randn(48, 64))
    wide = torch.randn(40, 200)
    apart = wide[:, 100:164]
    assert torch.equal(ops.linear(apart, weight), ops.linear(apart.contiguous(), weight))
    norm = torch.randn(64)
    assert torch.equal(ops.rms_norm(apart, norm, 1e-6), ops.rms_norm(apart.contiguous(), norm, 1e-6))


@pytest.mark.parametrize("features", [16, 100, 768, 3584, 16400])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_row_of_an_activation_does_not_depend_on_the_others(
    features: int, activation: Activation, threads: int
) -> None:
    torch.manual_seed(4)
    x = 3 * torch.randn(NUM_ROWS, 2 * features)
    whole = _rows_do_not_see_each_other(lambda rows: TorchOps().gated(rows, activation), x)
    gate, up = x.double().chunk(2, -1)
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(whole.double(), act * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("features", [16, 100, 768, 8192])
def test_a_row_of_a_norm_does_not_depend_on_the_others(features: int, threads: int) -> None:
    torch.manual_seed(5)
    x, weight = torch.randn(NUM_ROWS, features), torch.randn(features)
    whole = _rows_do_not_see_each_other(lambda rows: TorchOps().rms_norm(rows, weight, 1e-6), x)
    expected = torch.nn.functional.rms_norm(x.double(), (features,), weight.double(), 1e-6)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("features", [7, 320, 32000])
def test_a_row_of_capped_logits_does_not_depend_on_the_others(features: int, threads: int) -> None:
    torch.manual_seed(6)
    x = 20 * torch.randn(NUM_ROWS, features)
    whole = _rows_do_not_see_each_other(lambda rows: softcap_(rows, 30.0), x)
    torch.testing.assert_close(whole.double(), 30 * torch.tanh(x.double() / 30), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("function", [torch.exp, torch.tanh, torch.sin, torch.cos])
def test_what_activations_are_made_of_has_the_same_bits_alone_and_in_any_row(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    values = torch.linspace(-20, 5, 4001)
    straight = function(values)
    assert torch.equal(torch.cat([function(value) for value in torch.split(values, 1)]), straight)
    assert torch.equal(function(torch.stack((values, values), 1)[:, 0]), straight)


def test_a_weight_comes_back_as_it_was_packed_and_row_by_row() -> None:
    torch.manual_seed(7)
    ops = TorchOps()
    matrix = torch.randn(50, 24).bfloat16()
    weight = ops.pack(matrix.clone(), torch.randn(50))
    assert torch.equal(ops.unpack(weight), matrix)
    indices = torch.tensor([49, 0, 7, 7])
    assert torch.equal(ops.rows(weight, indices), matrix.float()[indices])
    again = ops.packed(24, 50, weight.tensors)
    x = torch.randn(3, 24)
    assert torch.equal(ops.linear(x, again), ops.linear(x, weight))


def test_no_rows_give_no_rows() -> None:
    ops = TorchOps()
    assert ops.linear(torch.empty(0, 24), ops.pack(torch.randn(50, 24))).shape == (0, 50)


def test_the_name_says_where_the_bits_hold() -> None:
    name = TorchOps().name
    assert torch.__version__.split("+")[0] in name and "/cpu-" in name and "/float32/tile32/numpy-" in name
    assert name == TorchOps().name
