"""An input's bits are the same alone and in every batch, at every place of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.encoder.batch import Encoder, EncoderInput, Values
from tandem_engine.ops.base import LayerNorm
from tandem_engine.ops.torch_ops import TorchOps
from tests.tandem_engine.encoder import checkpoints
from tests.tandem_engine.encoder.loaded import load, loaded, random_texts
from tests.tandem_engine.ops.cpu_machines import cpu_ops

KINDS = ["bert", "classifier", "qwen3"]
LENGTHS = st.lists(st.integers(1, checkpoints.NUM_POSITIONS), min_size=1, max_size=12)


@cache
def _encoder(kind: str, kernels: str) -> Encoder:
    folder = Path(mkdtemp(prefix="tandem-encoder-"))
    if kind == "classifier":
        checkpoints.make_with_head("roberta", folder, 4)
    else:
        checkpoints.make(kind, folder)
    if kind == "qwen3":
        checkpoints.write_sentence_files(folder, "pooling_mode_lasttoken")
    return load(folder, kernels)


@cache
def _alone(kind: str, kernels: str) -> tuple[list[EncoderInput], list[Values]]:
    """Return one text of each length, and its values when it is encoded by itself."""
    texts = random_texts(range(1, checkpoints.NUM_POSITIONS + 1))
    return texts, [_encoder(kind, kernels).encode([text])[0] for text in texts]


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_alone_equals_batched(kind: str, kernels: str) -> None:
    encoder, (texts, alone) = _encoder(kind, kernels), _alone(kind, kernels)

    @settings(max_examples=25, deadline=None)
    @given(lengths=LENGTHS)
    def check(lengths: list[int]) -> None:
        values = encoder.encode([texts[length - 1] for length in lengths])
        for length, row in zip(lengths, values, strict=True):
            assert row.tobytes() == alone[length - 1].tobytes()

    check()


def test_the_number_of_threads_changes_no_bit(tmp_path: Path) -> None:
    checkpoints.make("bert", tmp_path)
    texts = random_texts([3, 96, 50, 1])
    one, three = (loaded(tmp_path, num_threads=threads).encoder.encode(texts) for threads in (1, 3))
    assert one.tobytes() == three.tobytes()
    cpu_ops().set_num_threads(1)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 100, 700])
def test_one_op_for_all_layers_has_the_bits_of_its_ops(num_tokens: int) -> None:
    stack = _encoder("bert", "cpp")._stack  # type: ignore[attr-defined]
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((num_tokens, 72), np.float32))
    starts = torch.tensor([0, *([num_tokens // 3] if num_tokens > 3 else []), num_tokens])
    one_by_one = stack._op_by_op(x.clone(), starts)
    assert torch.equal(stack._at_once.forward(x.clone(), starts), one_by_one)


@pytest.mark.parametrize("name", ["cpp", "torch"])
def test_ops_of_encoders_compute_rows_alone(name: str) -> None:
    ops = cpu_ops() if name == "cpp" else TorchOps()
    for size in (1, 15, 16, 31, 72, 384):
        x, norm = torch.randn(40, size) * 4, LayerNorm(torch.randn(size), torch.randn(size), 1e-7)
        exact = torch.nn.functional.layer_norm(x.double(), (size,), norm.weight.double(), norm.bias.double(), 1e-7)
        torch.testing.assert_close(ops.layer_norm(x, norm).double(), exact, atol=2e-5, rtol=2e-5)
        by_rows = torch.cat([ops.layer_norm(row.unsqueeze(0), norm) for row in x])
        assert torch.equal(ops.layer_norm(x, norm), by_rows)
        more = torch.randn(40, size)
        total = x + more
        assert torch.equal(ops.layer_norm(x.clone(), norm, more), ops.layer_norm(total, norm))
        for activation, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
            y = ops.activate(x, activation)  # type: ignore[arg-type]
            exact = torch.nn.functional.gelu(x.double(), approximate=approximate)
            torch.testing.assert_close(y.double(), exact, atol=1e-6, rtol=1e-6)
            assert torch.equal(torch.cat([ops.activate(row.unsqueeze(0), activation) for row in x]), y)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cpp", "torch"])
@pytest.mark.parametrize("dim", [18, 32, 64])
def test_attention_sees_the_whole_run_and_no_other(name: str, dim: int) -> None:
    ops = cpu_ops() if name == "cpp" else TorchOps()
    lengths = [1, 2, 16, 33, 500]
    qkv = torch.randn(sum(lengths), 3 * 2 * dim)
    starts = torch.tensor([0, *np.cumsum(lengths)])
    attended = ops.self_attention(qkv, 2, starts, dim**-0.5)
    for run, out in zip(qkv.split(lengths), attended.split(lengths), strict=True):
        query, key, value = run.double().view(-1, 3, 2, dim).permute(1, 2, 0, 3)
        exact = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(0, 1).flatten(1)
        torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=2e-6)
        alone = ops.self_attention(run.contiguous(), 2, torch.tensor([0, len(run)]), dim**-0.5)
        assert torch.equal(alone, out)
